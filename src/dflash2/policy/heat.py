"""Heat: how likely a block is used before HBM has turned over once; value: what its place is worth.

Requests are sorted into sessions (``sessions``), their blocks into segments that stand or fall together
(``segments``). How long a session stays away is learned from what was seen (``forecast``, ``gaps``, ``hazard``): while
a request runs, from what is known at its arrival; from its end on, from how it ended, too. Value is the best ratio of
expected uses to expected time of holding (``index``). ``docs/policy.md`` has it on a page.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Hashable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from dflash2.policy.base import Outcome, RequestTraits
from dflash2.policy.forecast import NUM_SHARED_CLASSES, Forecaster, Request
from dflash2.policy.horizon import TurnoverHorizon
from dflash2.policy.ranking import smallest_first
from dflash2.policy.segments import CLASS_OF_NOBODY, SegmentClass, Segments, SegmentStore
from dflash2.policy.sessions import WIDELY_SHARED
from dflash2.policy.shares import ShareOfUse
from dflash2.table.page_table import PageTable
from dflash2.types import BoolArray, FloatArray, IntArray, Tier

logger = logging.getLogger(__name__)

Floats = npt.NDArray[np.float64]

HEAT_AT_HORIZON = 0.8
"""Heat of a block whose next use is known to lie exactly one horizon away: the default threshold."""
STATE_VERSION = 1
SWEEP_EVERY = 100
"""Requests between two counts of the segments' blocks."""
KNOWN_SOONEST_S = 0.1
"""A block whose known next use is nearer than this is worth no more than one that is so near."""
LEVEL_OF_SHARERS = np.clip(np.log2(np.maximum(np.arange(256), 1)).astype(np.int64) - 1, 0, NUM_SHARED_CLASSES - 2)
"""Class of a block by how many sessions share it."""
EARLY = 0.25
"""Between steps, when heat is computed anew, counting and learning come so much earlier, that no step has to wait."""
VALUES_STAY = 0.003
"""Part of the horizon for which the value of a segment is taken to stay what it was."""
FEW = 512
LONG_RUN_S = 4 * 3600.0
"""What is not used for so long will have left every tier."""
LEAST_CHANCE = {Tier.HBM: 0.0, Tier.DRAM: 0.01, Tier.NVME: 0.18}
"""A copy is worth its write if it is used in the long run with this probability at least."""
"""So many blocks are ordered one by one."""


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
        self._forecast = Forecaster()
        self._segments = SegmentStore()
        self._shares = ShareOfUse()
        self._requests: dict[str, Request] = {}
        self._num_arrivals = 0
        self._last_s = 0.0
        self._values_at = -np.inf
        self._values: Floats = np.zeros(0)
        self._ascending: Segments = np.zeros(0, np.int64)
        self._sizes: Segments = np.zeros(0, np.int64)
        """Of ``_ascending``: blocks up to and including each segment, as of when all values were computed."""
        self._changed: set[int] = set()
        """Segments whose value is not what ``_values`` says."""

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
        self._changed.update(request.previous or ())

    def on_finish(self, request_id: str, outcome: Outcome | None, now: float) -> None:
        request = self._requests.pop(request_id, None)
        if request is not None:
            self._forecast.finish(request, outcome, now)
            self._changed.update(request.session.segments)

    def on_use(self, table: PageTable, ids: IntArray, now: float, request_id: str | None) -> None:
        self._segments.fit_table(table)
        self._note_shared_use(ids, now)
        request = self._requests.get(request_id) if request_id is not None else None
        if request is None:
            self._take_over(ids, now)
        else:
            if request.num_seen and len(ids):  # another turn of the same request
                age = now - float(table.last_use[ids[-1]])
                self._forecast.turns.note_use(0, age, len(ids))
            self._settle(table, request, ids)
            request.num_seen = 0
            self._assign(request, ids, now)
        table.last_use[ids] = now

    def on_allocate(self, table: PageTable, ids: IntArray, now: float, request_id: str | None) -> None:
        self._turnover.note(len(ids), now)
        self._segments.fit_table(table)
        table.last_use[ids] = now
        self._segments.forget_uses(ids)
        request = self._requests.get(request_id) if request_id is not None else None
        if request is None:
            self._take_over(ids, now)
        else:
            self._settle(table, request, ids[:0])
            self._assign(request, ids, now)
        self._housekeeping(table, now, ahead=1.0)

    # -- what is asked -------------------------------------------------------------------------------------------

    def refresh(self, table: PageTable, now: float) -> None:
        self._segments.fit_table(table)
        self._housekeeping(table, now, ahead=EARLY)
        table.heat[:] = self._segment_chance(now, self.horizon_s(now))[self._segments.of_block]
        special = np.flatnonzero(np.isfinite(table.next_use) | (table.ref_count > 0)).astype(np.int32)
        table.heat[special] = self.heat(table, special, now)

    def heat(self, table: PageTable, ids: IntArray, now: float) -> FloatArray:
        """float32 ``[n]`` in [0, 1] at this moment."""
        self._segments.fit_table(table)
        guessed = self._segment_chance(now, self.horizon_s(now))[self._segments.of_block[ids]]
        paused = np.flatnonzero(table.ref_count[ids])
        if len(paused):
            chance = self._forecast.outlook.paused_chance(table.last_use[ids[paused]], now, self.horizon_s(now))
            guessed[paused] = np.maximum(guessed[paused], chance)
        next_use = table.next_use[ids]
        wait = np.maximum(next_use - now, 0.0) / self.horizon_s(now)
        known = 1.0 / (1.0 + wait * (1.0 / HEAT_AT_HORIZON - 1.0))
        heat = np.where(np.isfinite(next_use), known, guessed)
        return np.where(table.pin_count[ids] > 0, 1.0, heat).astype(np.float32)

    def is_cold(self, table: PageTable, ids: IntArray, now: float) -> BoolArray:
        return self.heat(table, ids, now) < self.effective_threshold

    def order(self, table: PageTable, ids: IntArray, count: int, now: float) -> IntArray:
        if count <= 0 or not len(ids):
            return ids[:0]
        self._segments.fit_table(table)
        values = self._segment_values(now)
        if len(ids) > FEW and count < len(ids):
            ids = self._least(table, ids, count, values)
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
        chance = self._segment_chance(now, LONG_RUN_S)[self._segments.of_block[ids]]
        return (chance >= LEAST_CHANCE[tier]) | (table.ref_count[ids] > 0) | np.isfinite(table.next_use[ids])

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
            "value_per_s": float(self._segment_values(now)[segment]),
        }
        if kind < SegmentClass.SHARED:
            why |= {"share_used": round(float(segments.share[segment]), 3)}
            why |= self._forecast.outlook.describe(int(segments.session[segment]), now)
        return why

    def state(self) -> dict[str, Any]:
        learned = self._forecast.state(self._last_s)
        return {"policy": self.name, "version": STATE_VERSION, "shares": self._shares.state(), **learned}

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
        self._forecast, self._shares = forecast, shares

    # -- inside --------------------------------------------------------------------------------------------------

    def _take_over(self, ids: IntArray, now: float) -> None:
        """Blocks of nobody known."""
        segment = self._segments.new(0, SegmentClass.UNKNOWN, 0, 1.0, now)
        self._segments.move(ids, segment)
        self._changed.add(segment)

    def _settle(self, table: PageTable, request: Request, used: IntArray) -> None:
        """Which blocks of the session's last request are used again; the others were left."""
        if request.previous is None:
            return
        segments, row = self._segments, request.session.row
        of_used = segments.of_block[used]
        for segment in request.previous:
            if not segments.belongs(segment, row):
                continue
            kind, level = SegmentClass(int(segments.kind[segment])), int(segments.level[segment])
            num_blocks = 0 if kind is SegmentClass.SHARED else segments.count(table, segment)
            if not num_blocks:
                continue
            num_used = int(np.count_nonzero(of_used == segment))
            self._shares.note(kind, level, num_used / num_blocks)
            if num_used < num_blocks:
                level = self._shares.level_left(kind, level)
                segments.leave(segment, level, self._shares.of(SegmentClass.LEFT, level))
                request.session.segments.append(segment)
        request.previous = None

    def _assign(self, request: Request, ids: IntArray, now: float) -> None:
        """Put blocks, the request's next ones, into its segments."""
        if not len(ids):
            return
        segments = self._segments
        segments.count_session(ids, request.session.row)
        request.num_seen += len(ids)
        sharers = segments.num_sessions_of[ids]
        if sharers.max() >= WIDELY_SHARED:
            shared = sharers >= WIDELY_SHARED
            levels = LEVEL_OF_SHARERS[sharers[shared]]
            for level in set(levels.tolist()):
                self._move(request, ids[shared][levels == level], SegmentClass.SHARED, level, now)
            ids = ids[~shared]
        if request.partial_tail and request.num_seen == request.num_keys and len(ids):
            self._move(request, ids[-1:], SegmentClass.TAIL, 0, now)
            ids = ids[:-1]
        if len(ids):
            self._move(request, ids, SegmentClass.MAIN, 0, now)

    def _move(self, request: Request, ids: IntArray, kind: SegmentClass, level: int, now: float) -> None:
        segments, row = self._segments, request.session.row
        segment = request.segments.get((kind, level))
        if segment is None or not segments.belongs(segment, row):
            segment = segments.new(row, kind, level, self._shares.of(kind, level), now)
            request.segments[kind, level] = segment
            request.session.segments.append(segment)
        segments.touched_s[segment] = now
        segments.move(ids, segment)
        self._changed.add(segment)

    def _note_shared_use(self, ids: IntArray, now: float) -> None:
        """Blocks of several sessions, or of nobody known, are used: how long that took is learned from."""
        segments = self._segments
        of_used = segments.of_block[ids]
        undecided = of_used[segments.kind[of_used] >= SegmentClass.SHARED]
        for segment, count in Counter(undecided.tolist()).items():
            shared = segments.kind[segment] == SegmentClass.SHARED
            number = int(segments.level[segment]) if shared else CLASS_OF_NOBODY
            self._forecast.touches.note_use(number, now - float(segments.touched_s[segment]), count)

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

    def _segment_values(self, now: float) -> Floats:
        """Expected uses per second of each segment, ``[segments]``; infinite where there is none.

        All are computed anew when the last time is more than a small part of the horizon ago; in between only those of
        sessions that something has happened to.
        """
        segments = self._segments
        stale = now - self._values_at > VALUES_STAY * self.horizon_s(now) or now < self._values_at
        if stale or len(self._values) != len(segments.live):
            self._values = np.full(len(segments.live), np.inf)
            self._set_values(*segments.split(), now)
            self._values_at = now
            self._ascending = np.argsort(self._values, kind="stable")
            self._sizes = np.cumsum(segments.num_blocks[self._ascending])
        elif self._changed:
            changed = np.array(list(self._changed), np.int64)
            changed = changed[segments.live[changed]]
            shared = segments.kind[changed] >= SegmentClass.SHARED
            self._set_values(changed[~shared], changed[shared], now)
        self._changed.clear()
        return self._values

    def _set_values(self, decided: Segments, shared: Segments, now: float) -> None:
        segments, outlook = self._segments, self._forecast.outlook
        if len(decided):
            value = outlook.session_value(segments.session[decided].astype(np.int64), now)
            self._values[decided] = value * segments.share[decided]
        if len(shared):
            touched = segments.touched_s[shared]
            self._values[shared] = outlook.touch_value(segments.touch_class(shared), touched, now)

    def _segment_chance(self, now: float, horizon: float) -> FloatArray:
        """Probability of a use within ``horizon`` seconds, of each segment's blocks, ``[segments]``."""
        segments, outlook = self._segments, self._forecast.outlook
        heat = np.zeros(len(segments.live), np.float32)
        decided, shared = segments.split()
        chance = outlook.session_chance(segments.session[decided].astype(np.int64), now, horizon)
        heat[decided] = chance * segments.share[decided]
        touched = segments.touched_s[shared]
        heat[shared] = outlook.touch_chance(segments.touch_class(shared), touched, now, horizon)
        return heat

    def _least(self, table: PageTable, ids: IntArray, count: int, values: Floats) -> IntArray:
        """Those of ``ids`` that may be among the ``count`` least valuable: whole segments, from the least on."""
        ascending, sizes = self._ascending, self._sizes
        value = values[self._segments.of_block[ids]]
        wanted = 2 * count
        while True:
            at = int(np.searchsorted(sizes, wanted))
            if at >= len(ascending):
                return ids
            chosen: IntArray = ids[value <= values[ascending[at]]]
            expected = np.isfinite(table.next_use[chosen]) | (table.ref_count[chosen] > 0)
            if len(chosen) - np.count_nonzero(expected) >= count:
                return chosen
            wanted *= 4
