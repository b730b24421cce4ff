"""The lines that ``grep dflash2_swap`` finds (SPEC 5.4)."""

from __future__ import annotations

import logging
import time

from dflash2.runtime import Runtime
from dflash2.types import Tier

logger = logging.getLogger(__name__)

INTERVAL_S = 10.0

_SHOWN = (
    *("swap_in_blocks", "swap_out_blocks", "demoted_to_nvme_blocks", "loaded_from_nvme_blocks"),
    *("dropped_blocks", "failed_copies"),
)


class SwapLog:
    """One line in ten seconds, while something was swapped.

    Args:
        runtime: whose counters are read.
    """

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._next = time.monotonic() + INTERVAL_S
        self._before = self._counts()

    def step(self) -> None:
        """Write the line if it is time and something moved."""
        now = time.monotonic()
        if now < self._next:
            return
        self._next = now + INTERVAL_S
        after = self._counts()
        if after != self._before:
            logger.info("dflash2_swap %s", self._line(after))
            self._before = after

    def _counts(self) -> dict[str, int]:
        return dict(self._runtime.cache.counters.flat())

    def _line(self, after: dict[str, int]) -> str:
        table = self._runtime.cache.table
        parts = [f"{name}=+{after[name] - self._before[name]}" for name in _SHOWN]
        parts += [f"{tier.label}={table.num_used(tier)}/{table.capacity(tier)}" for tier in Tier]
        parts.append(f"hbm_hit_rate={self._runtime.cache.counters.hbm_hit_rate:.3f}")
        return " ".join(parts)
