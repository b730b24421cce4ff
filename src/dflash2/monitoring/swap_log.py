"""The lines that ``grep dflash2_swap`` finds: what moved between the tiers, and how full they are."""

from __future__ import annotations

import logging

from dflash2.monitoring.counters import CacheCounters
from dflash2.table.page_table import PageTable
from dflash2.types import Tier

logger = logging.getLogger(__name__)

INTERVAL_S = 10.0

_SHOWN = (
    *("swap_in_blocks", "swap_out_blocks", "demoted_to_nvme_blocks", "loaded_from_nvme_blocks"),
    *("dropped_blocks", "failed_copies", "recomputed_tokens"),
)


class SwapLog:
    """At most one line in ``INTERVAL_S`` seconds, and only when something moved.

    Args:
        table: says how full the tiers are.
        counters: what is counted.
        now: time of the first call's clock.
    """

    def __init__(self, table: PageTable, counters: CacheCounters, now: float) -> None:
        self._table = table
        self._counters = counters
        self._next = now + INTERVAL_S
        self._before = self._counts()

    def step(self, now: float) -> None:
        """Write the line if it is time and something moved since the last one."""
        if now < self._next:
            return
        self._next = now + INTERVAL_S
        after = self._counts()
        if after != self._before:
            logger.info("dflash2_swap %s", self._line(after))
            self._before = after

    def _counts(self) -> dict[str, int]:
        return {name: getattr(self._counters, name) for name in _SHOWN}

    def _line(self, after: dict[str, int]) -> str:
        table = self._table
        parts = [f"{name}=+{after[name] - self._before[name]}" for name in _SHOWN]
        parts += [f"{tier.label}={table.num_used(tier)}/{table.capacity(tier)}" for tier in Tier]
        parts.append(f"hbm_hit_rate={self._counters.hbm_hit_rate:.3f}")
        return " ".join(parts)
