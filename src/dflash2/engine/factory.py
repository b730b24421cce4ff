"""From a model and a configuration to an engine that runs."""

from __future__ import annotations

import logging
from pathlib import Path

import torch

from dflash2.build import check_start, create_runtime
from dflash2.cache.admission import Admission
from dflash2.cache.smoothing import ButterworthLowPass
from dflash2.config import Config
from dflash2.engine.adapters import Adapters
from dflash2.engine.engine import ReferenceEngine
from dflash2.engine.lora_layers import LoraLayers
from dflash2.engine.model_loader import LoadedModel, load_model
from dflash2.engine.model_runner import ModelRunner
from dflash2.engine.promises import Promises
from dflash2.engine.recompute_scheduler import RecomputeScheduler
from dflash2.engine.scheduler import Scheduler
from dflash2.engine.scheduler_limits import SchedulerLimits
from dflash2.engine.swap_scheduler import SwapScheduler
from dflash2.errors import ConfigError
from dflash2.pipeline.adapter_cache import AdapterCache
from dflash2.pipeline.adapter_loader import ThreadLoader
from dflash2.pipeline.adapter_registry import AdapterRegistry
from dflash2.runtime import Runtime
from dflash2.table.keys import KeyNamespace
from dflash2.types import MIB, Tier

logger = logging.getLogger(__name__)


def create_engine(
    model: str,
    config: Config,
    dtype: str = "auto",
    max_context_tokens: int | None = None,
    device: str = "cpu",
) -> ReferenceEngine:
    """Load a model and build an engine for it.

    Args:
        model: model folder, GGUF file or hub id.
        config: see ``assemble_engine``.
        dtype: of weights and KV, such as ``float32``; ``auto`` is float32 on a CPU and bfloat16 elsewhere.
        max_context_tokens: cap on prompt plus output; None: the model's own.
        device: torch device.

    Raises:
        ConfigError, CapacityError, StorageError, ModelError: with what to do.
    """
    check_start(config)
    if dtype == "auto":
        dtype = "float32" if device == "cpu" else "bfloat16"
    return assemble_engine(load_model(model, dtype=dtype, device=device), config, max_context_tokens)


def assemble_engine(loaded: LoadedModel, config: Config, max_context_tokens: int | None = None) -> ReferenceEngine:
    """Build an engine around a model that is loaded already; several may share one model, one after the other.

    Args:
        loaded: the model.
        config: unless ``enable`` is true the engine has HBM only and recomputes when it is full.
        max_context_tokens: cap on prompt plus output; None: the model's own.

    Raises:
        ConfigError, CapacityError, StorageError: see ``create_runtime``.
    """
    context = max_context_tokens or loaded.max_context
    if context > loaded.max_context:
        raise ConfigError(f"a context of {context} tokens was asked for; the model has {loaded.max_context}")
    layout = loaded.kv_layout(config.kv_block.block_size)
    namespace = KeyNamespace(loaded.config.model_type, loaded.fingerprint, layout.dtype, layout.block_size)
    runtime = create_runtime(config, layout, namespace, device=str(loaded.model.device))
    lora = _lora_layers(loaded, config)
    return ReferenceEngine(
        runtime,
        ModelRunner(loaded.model, runtime.hbm_tensor, layout, lora),
        _scheduler(runtime, config),
        max_context_tokens=context,
        eos_token_ids=frozenset(loaded.eos_token_ids),
        vocab_size=loaded.vocab_size,
        adapters=None if lora is None else _adapters(lora, config),
    )


def _scheduler(runtime: Runtime, config: Config) -> Scheduler:
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


def _lora_layers(loaded: LoadedModel, config: Config) -> LoraLayers | None:
    """Room for adapters on the device, if the configuration speaks of any."""
    lora = config.lora
    if not lora.adapters and lora.directory is None:
        return None
    return LoraLayers(loaded.model, lora.max_loaded, lora.max_rank, getattr(torch, loaded.dtype))


def _adapters(lora: LoraLayers, config: Config) -> Adapters:
    """The adapters of the configuration, checked.

    Raises:
        ModelError, RequestError: one of them cannot be used.
    """
    settings = config.lora
    folder = None if settings.directory is None else Path(settings.directory)
    registry = AdapterRegistry(lora.targets, settings.max_rank, folder)
    for name, path in settings.adapters.items():
        registry.add(name, Path(path))
    logger.info(
        "LoRA: room for %d adapters up to rank %d on the device (%.1f MB), %d MiB of DRAM; %d registered",
        settings.max_loaded,
        settings.max_rank,
        lora.num_bytes / 1e6,
        settings.dram_capacity_mb,
        len(settings.adapters),
    )
    cache = AdapterCache(settings.max_loaded, settings.dram_capacity_mb * MIB, ThreadLoader(lora.fill))
    return Adapters(registry, cache)
