"""Plain least-recently-used: the first generation, and the baseline for everything else (R-1.1)."""

from __future__ import annotations

import numpy as np

from dflash2.policy.horizon import TurnoverHorizon
from dflash2.policy.ranking import smallest_first
from dflash2.table.page_table import PageTable
from dflash2.types import BoolArray, IntArray


class LRUPolicy:
    """Everything that is not in use may go; the longest unused goes first."""

    name = "lru"

    def __init__(self, num_hbm_slots: int) -> None:
        self.cold_threshold = 1.0
        self._turnover = TurnoverHorizon(num_hbm_slots)

    def horizon_s(self, now: float) -> float:
        return self._turnover.seconds(now)

    def on_use(self, table: PageTable, ids: IntArray, now: float) -> None:
        table.last_use[ids] = now

    def on_allocate(self, table: PageTable, ids: IntArray, now: float) -> None:
        self._turnover.note(len(ids), now)
        table.last_use[ids] = now

    def refresh(self, table: PageTable, now: float) -> None:
        """Heat is the rank by recency, so that reports have something to show: 1 for the block used last."""
        live = table.live()
        if len(live):
            order = np.argsort(np.argsort(table.last_use[live], kind="stable"))
            table.heat[live] = (order + 1) / len(live)

    def is_cold(self, table: PageTable, ids: IntArray, now: float) -> BoolArray:
        return np.ones(len(ids), np.bool_)

    def order(self, table: PageTable, ids: IntArray, count: int, now: float) -> IntArray:
        return smallest_first(ids, table.last_use[ids], table.position[ids], count)
