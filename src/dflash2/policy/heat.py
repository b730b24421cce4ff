"""Heat: how likely a block is used before HBM has turned over once; value: what its place is worth.

Requests are sorted into sessions (``sessions``), their blocks into segments that stand or fall together
(``segments``). How long a session stays away is learned from what was seen (``forecast``, ``gaps``, ``hazard``): while
a request runs, from what is known at its arrival; from its end on, from how it ended, too. Value is the best ratio of
expected uses to expected time of holding (``gittins``). ``docs/policy.md`` has it on a page.
"""

from __future__ import annotations

import logging
from collections.abc import Hashable, Sequence
from typing import Any

import numpy as np

from dflash2.policy.assignment import Assignment
from dflash2.policy.base import Outcome, RequestTraits
from dflash2.policy.forecast import Forecaster, Request
from dflash2.policy.horizon import TurnoverHorizon
from dflash2.policy.ranking import smallest_first
from dflash2.policy.rebuild import RebuildCost
from dflash2.policy.segment_values import SegmentValues
from dflash2.policy.segments import SegmentClass, SegmentStore
from dflash2.policy.shares import ShareOfUse
from dflash2.policy.write_filter import WriteFilter
from dflash2.table.page_table import PageTable
from dflash2.types import BoolArray, FloatArray, IntArray, Tier

logger = logging.getLogger(__name__)

HEAT_AT_HORIZON = 0.8
"""Heat of a block whose next use is known to lie exactly one horizon away: the default threshold."""
STATE_VERSION = 2
SWEEP_EVERY = 100
"""Requests between two counts of the segments' blocks."""
KNOWN_SOONEST_S = 0.1
"""A block whose known next use is nearer than this is worth no more than one that is so near."""
EARLY = 0.25
"""Between steps, when heat is computed anew, counting and learning come so much earlier, that no step has to wait."""
FEW = 512
"""So many blocks are ordered one by one."""
LONG_RUN_S = 4 * 3600.0
"""What is not used for so long will have left every tier."""
LEAST_CHANCE = {Tier.HBM: 0.0, Tier.DRAM: 0.01, Tier.NVME: 0.18}
"""A copy ahead of need is worth its write if it is used in the long run with this probability at least."""


class HeatPolicy:
    """Placement by heat.

    Args:
        num_hbm_slots: size of the fast pool, for the horizon.
        cold_threshold: blocks below this heat may be demoted; may be changed while running.
        rebuild: what the loss of a block costs, where it is weighed against a write; None: all blocks cost the same.
    """

    name = "heat"

    def __init__(self, num_hbm_slots: int, cold_threshold: float, rebuild: RebuildCost | None = None) -> None:
        self.cold_threshold = self.effective_threshold = cold_threshold
        self._turnover = TurnoverHorizon(num_hbm_slots)
        self._forecast = Forecaster()
        self._segments = SegmentStore()
        self._values = SegmentValues(self._segments, self._forecast.outlook)
        self._assignment = Assignment(self._segments, self._values.changed)
        self._writes = WriteFilter()
        self._rebuild = rebuild or RebuildCost()
        self._requests: dict[str, Request] = {}
        self._num_arrivals = 0
        self._last_s = 0.0

    def horizon_s(self, now: float) -> float:
        return self._turnover.seconds(now)

    # -- what is seen --------------------------------------------------------------------------------------------

    def on_arrival(self, request_id: str, traits: RequestTraits, keys: Sequence[Hashable], now: float) -> None:
        request, forgotten = self._forecast.arrive(traits, keys, now)
        if forgotten is not None:
            self._segments.disown(forgotten.row)
        self._requests[request_id] = request
        self._num_arrivals += 1
        self._last_s = now
        self._values.changed.update(request.previous or ())

    def on_finish(self, request_id: str, outcome: Outcome | None, now: float) -> None:
        request = self._requests.pop(request_id, None)
        if request is not None:
            self._forecast.finish(request, outcome, now)
            self._values.changed.update(request.session.segments)

    def on_use(self, table: PageTable, ids: IntArray, now: float, request_id: str | None) -> None:
        self._segments.fit_table(table)
        request = self._requests.get(request_id) if request_id is not None else None
        of_used = self._segments.of_block[ids]
        is_own = request is not None and self._assignment.are_its_own(request, of_used)
        if not is_own:
            self._assignment.note_shared_use(self._forecast, of_used, now)
        if request is None:
            self._assignment.take_over(ids, now)
        else:
            if not request.num_seen:
                found, known = len(ids), max(len(ids), request.num_common)
                self._writes.note_return(self._rebuild.total(0, found), self._rebuild.total(found, known))
            elif len(ids):  # another turn of the same request
                age = now - float(table.last_use[ids[-1]])
                self._forecast.turns.note_use(0, age, len(ids))
            self._assignment.settle(table, request, of_used)
            request.num_seen = 0
            (self._assignment.assign_own if is_own else self._assignment.assign)(request, ids, now)
        table.last_use[ids] = now

    def on_allocate(self, table: PageTable, ids: IntArray, now: float, request_id: str | None) -> None:
        self._turnover.note(len(ids), now)
        self._segments.fit_table(table)
        table.last_use[ids] = now
        request = self._requests.get(request_id) if request_id is not None else None
        if request is None:
            self._assignment.take_over_new(ids, now)
        else:
            self._assignment.settle(table, request, ids[:0])
            self._assignment.assign_new(request, ids, now)
        self._housekeeping(table, now, ahead=1.0)

    # -- what is asked -------------------------------------------------------------------------------------------

    def refresh(self, table: PageTable, now: float) -> None:
        self._segments.fit_table(table)
        self._housekeeping(table, now, ahead=EARLY)
        chances = self._values.chances(now, self.horizon_s(now))
        table.heat[:] = chances[self._segments.of_block]
        special = np.flatnonzero(np.isfinite(table.next_use) | (table.ref_count > 0)).astype(np.int32)
        table.heat[special] = self._heat(table, special, chances, now)

    def heat(self, table: PageTable, ids: IntArray, now: float) -> FloatArray:
        """float32 ``[n]`` in [0, 1] at this moment."""
        self._segments.fit_table(table)
        return self._heat(table, ids, self._values.chances(now, self.horizon_s(now)), now)

    def is_cold(self, table: PageTable, ids: IntArray, now: float) -> BoolArray:
        return self.heat(table, ids, now) < self.effective_threshold

    def order(self, table: PageTable, ids: IntArray, count: int, now: float) -> IntArray:
        if count <= 0 or not len(ids):
            return ids[:0]
        self._segments.fit_table(table)
        values = self._values.of_segments(now, self.horizon_s(now))
        if len(ids) > FEW and count < len(ids):
            ids = self._values.least(table, ids, count)
        value = values[self._segments.of_block[ids]]
        paused = np.flatnonzero(table.ref_count[ids])
        if len(paused):
            of_turn = self._forecast.outlook.paused_value(table.last_use[ids[paused]], now)
            value[paused] = np.maximum(value[paused], of_turn)
        next_use = table.next_use[ids]
        known = 1.0 / np.maximum(next_use - now, KNOWN_SOONEST_S)
        value = np.where(np.isfinite(next_use), np.maximum(known, value), value)
        return smallest_first(ids, value, table.position[ids], count)

    def worth_storing(self, table: PageTable, ids: IntArray, tier: Tier, now: float) -> BoolArray:
        self._segments.fit_table(table)
        chance = self._values.chances_of(self._segments.of_block[ids], now, LONG_RUN_S)
        return (chance >= LEAST_CHANCE[tier]) | (table.ref_count[ids] > 0) | np.isfinite(table.next_use[ids])

    def on_leave(self, table: PageTable, ids: IntArray, tier: Tier, now: float) -> BoolArray:
        self._segments.fit_table(table)
        guessed: BoolArray = ~np.isfinite(table.next_use[ids])
        chance = self._values.chances_of(self._segments.of_block[ids], now, LONG_RUN_S)
        if tier is not Tier.NVME:
            return guessed & (chance < LEAST_CHANCE[tier])
        cost = self._rebuild.of(table.position[ids[guessed]])
        guessed[guessed] = self._writes.judge(chance[guessed] * cost)
        return guessed

    def explain(self, table: PageTable, block_id: int, now: float) -> dict[str, Any]:
        self._segments.fit_table(table)
        segments = self._segments
        segment = int(segments.of_block[block_id])
        kind = SegmentClass(int(segments.kind[segment]))
        why: dict[str, Any] = {
            "policy": self.name,
            "age_s": round(now - float(table.last_use[block_id]), 3),
            "horizon_s": round(self.horizon_s(now), 3),
            "role": kind.name.lower(),
            "sessions": int(segments.num_sessions_of[block_id]),
            "value_per_s": float(self._values.of_segments(now, self.horizon_s(now))[segment]),
        }
        if kind < SegmentClass.SHARED:
            why |= {"share_used": round(float(segments.share[segment]), 3)}
            why |= self._forecast.outlook.describe(int(segments.session[segment]), now)
        return why

    def state(self) -> dict[str, Any]:
        learned = self._forecast.state(self._last_s)
        return {"policy": self.name, "version": STATE_VERSION, "shares": self._assignment.shares.state(), **learned}

    def restore(self, state: dict[str, Any]) -> None:
        if state.get("policy") != self.name or state.get("version") != STATE_VERSION:
            return
        forecast, shares = Forecaster(), ShareOfUse()
        try:
            forecast.restore(state)
            shares.restore(state["shares"])
        except (KeyError, TypeError, ValueError) as error:
            logger.warning("what heat had learned before cannot be used, it begins anew: %s", error)
            return
        self._forecast, self._assignment.shares, self._values.outlook = forecast, shares, forecast.outlook

    # -- inside --------------------------------------------------------------------------------------------------

    def _heat(self, table: PageTable, ids: IntArray, chances: FloatArray, now: float) -> FloatArray:
        guessed = chances[self._segments.of_block[ids]]
        paused = np.flatnonzero(table.ref_count[ids])
        if len(paused):
            chance = self._forecast.outlook.paused_chance(table.last_use[ids[paused]], now, self.horizon_s(now))
            guessed[paused] = np.maximum(guessed[paused], chance)
        next_use = table.next_use[ids]
        wait = np.maximum(next_use - now, 0.0) / self.horizon_s(now)
        known = 1.0 / (1.0 + wait * (1.0 / HEAT_AT_HORIZON - 1.0))
        heat = np.where(np.isfinite(next_use), known, guessed)
        return np.where(table.pin_count[ids] > 0, 1.0, heat).astype(np.float32)

    def _housekeeping(self, table: PageTable, now: float, ahead: float) -> None:
        """Count, or learn a slice, when a part ``ahead`` of the usual number of requests has come since."""
        if self._num_arrivals >= ahead * SWEEP_EVERY:
            self._num_arrivals = 0
            segments, forecast = self._segments, self._forecast
            segments.sweep(table)
            waiting = np.flatnonzero(segments.live & (segments.kind >= SegmentClass.SHARED))
            ages = now - segments.touched_s[waiting]
            forecast.touches.refit(segments.touch_class(waiting), ages, segments.num_blocks[waiting])
            paused = np.flatnonzero((table.ref_count > 0) & (table.pin_count == 0))
            idle = now - table.last_use[paused]
            forecast.turns.refit(np.zeros(len(paused), np.int64), idle, np.ones(len(paused), np.int64))
            forecast.show_touches()
        elif self._forecast.is_time_to_learn(ahead):
            self._forecast.learn(now)
