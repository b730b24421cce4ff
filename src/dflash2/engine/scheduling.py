"""From the configuration to a scheduler."""

from __future__ import annotations

from dflash2.cache.admission import Admission
from dflash2.cache.smoothing import ButterworthLowPass
from dflash2.config import Config
from dflash2.engine.promises import Promises
from dflash2.engine.recompute_scheduler import RecomputeScheduler
from dflash2.engine.scheduler import Scheduler, SchedulerLimits
from dflash2.engine.swap_scheduler import SwapScheduler
from dflash2.runtime import Runtime
from dflash2.types import Tier


def create_scheduler(runtime: Runtime, config: Config) -> Scheduler:
    """The scheduler that swaps; unless ``enable`` is true, the one that recomputes, first come, first served."""
    settings = config.scheduling
    limits = SchedulerLimits(
        settings.max_batch_tokens,
        settings.max_running,
        settings.quantum_tokens,
        settings.admission_timeout_s,
        max_waiting=settings.max_waiting,
        short_first=config.enable and settings.order == "short_first",
        arrival_prefetch=config.enable and config.pipeline.enabled,
    )
    if not config.enable:
        return RecomputeScheduler(runtime, limits)
    smoother = ButterworthLowPass(settings.smoothing_order, settings.smoothing_cutoff) if settings.smoothing else None
    admission = Admission(runtime.cache.table.capacity(Tier.HBM), smoother)
    return SwapScheduler(runtime, limits, admission, Promises(runtime, settings.reserve))
