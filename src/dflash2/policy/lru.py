"""Plain least-recently-used: the first generation, and the baseline for everything else (R-1.1)."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import numpy as np

from dflash2.policy.base import Outcome, RequestTraits
from dflash2.policy.horizon import TurnoverHorizon
from dflash2.policy.ranking import smallest_first
from dflash2.table.page_table import PageTable
from dflash2.types import BoolArray, IntArray, Tier


class LRUPolicy:
    """Everything that is not in use may go; the longest unused goes first."""

    name = "lru"

    def __init__(self, num_hbm_slots: int) -> None:
        self.cold_threshold = self.effective_threshold = 1.0
        self._turnover = TurnoverHorizon(num_hbm_slots)

    def horizon_s(self, now: float) -> float:
        return self._turnover.seconds(now)

    def on_use(self, table: PageTable, ids: IntArray, now: float, request_id: str | None) -> None:
        table.last_use[ids] = now

    def on_allocate(self, table: PageTable, ids: IntArray, now: float, request_id: str | None) -> None:
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

    def on_arrival(self, request_id: str, traits: RequestTraits, keys: Sequence[Hashable], now: float) -> None:
        pass

    def on_finish(self, request_id: str, outcome: Outcome | None, now: float) -> None:
        pass

    def worth_storing(self, table: PageTable, ids: IntArray, tier: Tier, now: float) -> BoolArray:
        return np.ones(len(ids), np.bool_)

    def on_leave(self, table: PageTable, ids: IntArray, tier: Tier, now: float) -> BoolArray:
        return np.zeros(len(ids), np.bool_)

    def explain(self, table: PageTable, block_id: int, now: float) -> dict[str, Any]:
        return {"policy": self.name, "age_s": now - float(table.last_use[block_id])}

    def state(self) -> dict[str, Any]:
        return {}

    def restore(self, state: dict[str, Any]) -> None:
        pass
