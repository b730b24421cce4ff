"""Heat: how likely a block is used before HBM has turned over once.

A block whose next use is known from the scheduler's queue needs no guess. For the others uses are taken to be a Poisson
process whose rate is the decayed count of past uses over the horizon. One use that has just happened gives 0.63, two
0.86; both cool with age.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from dflash2.policy.base import Outcome, RequestTraits
from dflash2.policy.horizon import TurnoverHorizon
from dflash2.policy.ranking import smallest_first
from dflash2.table.page_table import PageTable
from dflash2.types import BoolArray, FloatArray, IntArray, Tier

HEAT_AT_HORIZON = 0.8
"""Heat of a block whose next use is known to lie exactly one horizon away: the default threshold."""


class HeatPolicy:
    """Placement by heat.

    Args:
        num_hbm_slots: size of the fast pool, for the horizon.
        cold_threshold: blocks below this heat may be demoted; may be changed while running.
    """

    name = "heat"

    def __init__(self, num_hbm_slots: int, cold_threshold: float) -> None:
        self.cold_threshold = self.effective_threshold = cold_threshold
        self._turnover = TurnoverHorizon(num_hbm_slots)

    def horizon_s(self, now: float) -> float:
        return self._turnover.seconds(now)

    def on_use(self, table: PageTable, ids: IntArray, now: float, request_id: str | None) -> None:
        table.use_count[ids] = self._decayed_count(table, ids, now) + 1.0
        table.last_use[ids] = now

    def on_allocate(self, table: PageTable, ids: IntArray, now: float, request_id: str | None) -> None:
        self._turnover.note(len(ids), now)
        table.use_count[ids] = 1.0
        table.last_use[ids] = now

    def refresh(self, table: PageTable, now: float) -> None:
        live = table.live()
        table.heat[live] = self.heat(table, live, now)

    def heat(self, table: PageTable, ids: IntArray, now: float) -> FloatArray:
        """float32 ``[n]`` in [0, 1] at this moment."""
        guessed = -np.expm1(-self._decayed_count(table, ids, now))
        wait = np.maximum(table.next_use[ids] - now, 0.0) / self.horizon_s(now)
        known = 1.0 / (1.0 + wait * (1.0 / HEAT_AT_HORIZON - 1.0))
        heat = np.where(np.isfinite(table.next_use[ids]), known, guessed)
        return np.where(table.pin_count[ids] > 0, 1.0, heat).astype(np.float32)

    def is_cold(self, table: PageTable, ids: IntArray, now: float) -> BoolArray:
        return self.heat(table, ids, now) < self.effective_threshold

    def order(self, table: PageTable, ids: IntArray, count: int, now: float) -> IntArray:
        heat = self.heat(table, ids, now).astype(np.float64)
        return smallest_first(ids, heat, table.position[ids], count)

    def on_arrival(self, request_id: str, traits: RequestTraits, keys: Sequence[Hashable], now: float) -> None:
        pass

    def on_finish(self, request_id: str, outcome: Outcome | None, now: float) -> None:
        pass

    def worth_storing(self, table: PageTable, ids: IntArray, tier: Tier, now: float) -> BoolArray:
        return np.ones(len(ids), np.bool_)

    def explain(self, table: PageTable, block_id: int, now: float) -> dict[str, Any]:
        return {"policy": self.name, "age_s": now - float(table.last_use[block_id])}

    def state(self) -> dict[str, Any]:
        return {}

    def restore(self, state: dict[str, Any]) -> None:
        pass

    def _decayed_count(self, table: PageTable, ids: IntArray, now: float) -> npt.NDArray[np.float64]:
        age = np.maximum(now - table.last_use[ids], 0.0)
        decay: npt.NDArray[np.float64] = np.exp(-age / self.horizon_s(now))
        return decay * table.use_count[ids]
