"""More running requests than HBM holds: they take turns, and what leaves is swapped, never dropped."""

from __future__ import annotations

import time
from dataclasses import asdict
from typing import Any

import numpy as np

from dflash2.cache.admission import Admission, WaitReason
from dflash2.cache.smoothing import ButterworthLowPass
from dflash2.cache.waiting import join
from dflash2.engine.promises import Promises
from dflash2.engine.request_state import RequestState
from dflash2.engine.scheduler import Scheduler
from dflash2.engine.scheduler_limits import SchedulerLimits
from dflash2.errors import RequestTooLarge
from dflash2.pipeline.stages import StageMeter
from dflash2.runtime import Runtime
from dflash2.types import Tier

ENTRY_SMOOTHING = 0.2
"""Weight of the newest gap in the average time between two entries."""
SMOOTHING_ORDER = 2
SMOOTHING_CUTOFF = 0.0002
"""Cycles per step. Demand that lasts ``0.35 / cutoff`` steps is let in for the most part."""
PATIENCE = 0.5
"""Share of its time to wait after which smoothing holds a request back no longer."""


class SwapScheduler(Scheduler):
    """Every request is reserved on the tiers together before it starts; HBM is shared by turns.

    A turn lasts until the prompt is computed and ``quantum_tokens`` more tokens are produced. A request whose turn is
    over keeps its place until somebody needs it.

    Args:
        runtime: memory of this rank.
        limits: bounds of a step and of the waits.
        admission: how much new demand is let in; by default with smoothing.
        promises: how much is reserved; by default what is estimated.
    """

    def __init__(
        self,
        runtime: Runtime,
        limits: SchedulerLimits,
        admission: Admission | None = None,
        promises: Promises | None = None,
    ) -> None:
        super().__init__(runtime, limits)
        self.admission = admission or Admission(
            runtime.cache.table.capacity(Tier.HBM), ButterworthLowPass(SMOOTHING_ORDER, SMOOTHING_CUTOFF)
        )
        self.promises = promises or Promises(runtime, "estimate")
        self.lookup_stage = StageMeter()
        self.estimate_stage = StageMeter()
        self._last_entry_s = runtime.clock()
        self._entry_gap_s = 1.0

    def upcoming(self) -> list[RequestState]:
        return list(self.paused)

    def leaving_next(self) -> list[RequestState]:
        """Resident requests while others wait, those with the longest turn behind them first."""
        if not self.paused:
            return []
        return sorted(self.resident, key=lambda state: -state.turn_tokens)

    def expected_wait_s(self) -> float:
        return self.admission.expected_wait_s(len(self.waiting))

    def stats(self) -> dict[str, Any]:
        admission, promises = self.admission.counters, self.promises.counters
        stats = super().stats()
        stats["stages"] |= {"lookup": self.lookup_stage.as_dict(), "estimate": self.estimate_stage.as_dict()}
        return {**stats, "admission": asdict(admission), "estimates": asdict(promises)}

    def remove(self, state: RequestState) -> None:
        if state.admitted and state.index == 0:
            self.promises.note_end(state)
        self.runtime.prompts.forget_arrival(state.sequence_id)
        super().remove(state)

    def _queue(self, state: RequestState) -> None:
        began = time.perf_counter()
        if self.limits.arrival_prefetch:
            self.runtime.prompts.arrive(state.sequence_id, state.tokens, state.adapter_key, state.request.tenant_salt)
        looked_up = time.perf_counter()
        state.size_tokens = self.promises.total_tokens(state)
        self.lookup_stage.passed(0.0, looked_up - began)
        self.estimate_stage.passed(0.0, time.perf_counter() - looked_up)
        if self.limits.short_first:
            state.is_small = self.admission.is_small(self.runtime.layout.num_blocks(state.size_tokens))
            join(self.waiting, state)
        else:
            self.waiting.append(state)

    def _admit(self, now: float) -> None:
        if self.waiting or self.admission.under_pressure:
            wanted = sum(self._first_turn_blocks(state) for state in self.waiting)
            self.admission.tick(self._working_set(), wanted, self._small_blocks())
        smoothed = False
        for state in list(self.waiting):
            if smoothed and not state.is_small and not self._is_overdue(state, now):
                continue
            reason = self._try_admit(state, now)
            if reason is None:
                self.waiting.remove(state)
                continue
            state.wait_reason = reason
            if reason is not WaitReason.SMOOTHED or state.is_small:
                return
            smoothed = True  # small ones, which have a part of HBM to themselves, need not wait for it

    def _try_admit(self, state: RequestState, now: float) -> WaitReason | None:
        """Reserve for a request and open it, or say what it waits for."""
        if self.num_running >= self.limits.max_running:
            return WaitReason.SEATS
        if any(other.waits_for_growth for other in self.paused):
            return WaitReason.GROWTH
        request = state.request
        names = (state.adapter_key, request.tenant_salt)
        needed = self._first_turn_blocks(state) - self.runtime.prompts.num_held_blocks(state.tokens, *names)
        if not self.admission.lets_in(needed, small=state.is_small, overdue=self._is_overdue(state, now)):
            return WaitReason.SMOOTHED
        total = self.promises.total_tokens(state)
        sequence = None
        for _ in range(2):  # once more, if running requests can give back what they turned out not to need
            try:
                sequence = self.runtime.open(
                    request.request_id,
                    state.tokens,
                    total - state.num_tokens,
                    num_branches=state.num_branches,
                    adapter=state.adapter_key,
                    tenant_salt=request.tenant_salt,
                    traits=state.traits,
                )
            except RequestTooLarge:  # the tiers have lost slots since it was accepted: its deadline ends it
                return WaitReason.ROOM
            if sequence is not None or not self.promises.give_back((*self.resident, *self.paused)):
                break
        if sequence is None:
            return WaitReason.ROOM
        self.runtime.prompts.forget_arrival(state.sequence_id)
        sequence.read_from(state.buffer)
        state.sequence = sequence
        state.promised_tokens = total
        self.admission.note_admitted(needed, now, small=state.is_small)
        if not state.admitted:
            state.num_cached_tokens = sequence.num_cached_tokens
            self._note_admitted(state, now)
        if self.limits.short_first:
            join(self.paused, state)
        else:
            self.paused.append(state)
        return None

    def _is_overdue(self, state: RequestState, now: float) -> bool:
        """Smoothing holds it back no longer: half its time to wait is over, or it has been running before."""
        return state.admitted or now >= state.deadline_s - PATIENCE * self.limits.admission_timeout_s

    def _working_set(self) -> int:
        """Distinct blocks of running requests, and what their next turns add."""
        held = int(np.count_nonzero(self.runtime.cache.table.ref_count))
        blocks_for = self.runtime.layout.num_blocks
        growth = sum(
            max(0, blocks_for(state.blocks.num_tokens + self._turn_tokens(state)) - len(state.blocks.block_ids))
            for state in (*self.resident, *self.paused)
        )
        return held + growth

    def _small_blocks(self) -> int:
        """Blocks of running small requests."""
        return sum(len(state.blocks.block_ids) for state in (*self.resident, *self.paused) if state.is_small)

    def _first_turn_blocks(self, state: RequestState) -> int:
        """Blocks of a waiting request at the end of its first turn."""
        return self.runtime.layout.num_blocks(
            min(state.num_tokens + self.limits.quantum_tokens, state.max_total_tokens)
        )

    def _make_resident(self, now: float) -> None:
        """Let paused requests in, in order; those whose turn is over make room for the first that does not fit."""
        changed = False
        for state in [state for state in self.paused if state.num_uncomputed]:
            if not self._cover_turn(state):
                continue
            while not self.runtime.try_enter(state.blocks, self._turn_tokens(state)):
                over = self._longest_over()
                if over is None:
                    break
                self._pause(over)
                changed = True
            else:
                self.paused.remove(state)
                state.turn_tokens = 0
                self._note_entry(now)
                self.resident.append(state)
                changed = True
                continue
            break
        if changed:
            self._foretell(now)
        if self.paused and not any(state.num_uncomputed for state in self.resident):
            self._end_standstill()

    def _cover_turn(self, state: RequestState) -> bool:
        """Extend the request's reservation to what its next turn needs; if that cannot be, it waits and is counted."""
        covered = self.promises.try_cover(state, state.blocks.num_tokens + self._turn_tokens(state))
        if not covered and not state.waits_for_growth:
            self.counters.growth_waits += 1
        state.waits_for_growth = not covered
        return covered

    def _end_standstill(self) -> None:
        """Nobody can go on because everybody's reservation is used up: the youngest gives all of its up.

        What it has computed stays cached until others need the room. It comes back with a whole reservation.
        """
        stuck = [state for state in self.paused if state.waits_for_growth]
        if not stuck or any(state.num_uncomputed and not state.waits_for_growth for state in self.paused):
            return
        youngest = max(stuck, key=lambda state: state.order)
        self.paused.remove(youngest)
        self.runtime.drop(youngest.blocks)
        youngest.sequence = None
        youngest.promised_tokens = 0
        youngest.waits_for_growth = False
        youngest.was_dropped = True
        self.waiting.appendleft(youngest)
        self.counters.preemptions_recomputed += 1

    def _try_grow(self, state: RequestState, count: int, now: float) -> bool:
        if not self.promises.try_cover(state, state.blocks.num_tokens + count):
            self._pause(state)  # it comes back when its reservation can be extended
            return False
        return super()._try_grow(state, count, now)

    def _on_no_room(self, state: RequestState) -> bool:
        """Its turn ends here: it is swapped at this step boundary and comes back with room for a whole turn."""
        if state.turn_tokens < self.limits.quantum_tokens:
            self.counters.unplanned_swaps += 1
        self._pause(state)
        return False

    def _park(self, state: RequestState) -> None:
        self.paused.append(state)

    def _turn_tokens(self, state: RequestState) -> int:
        wanted = state.num_tokens + self.limits.quantum_tokens
        return min(wanted, state.max_total_tokens) - state.blocks.num_tokens

    def _longest_over(self) -> RequestState | None:
        """The resident request that is longest over its turn. A beam that waits for the others needs no place.

        Otherwise two beams of one request might wait, one for the other's token and that for the first one's room.
        """
        over = [
            state
            for state in self.resident
            if state.turn_tokens >= self.limits.quantum_tokens or not state.num_uncomputed
        ]
        return max(over, key=lambda state: state.turn_tokens, default=None)

    def _pause(self, state: RequestState) -> None:
        self.runtime.pause(state.blocks)
        self.resident.remove(state)
        self.paused.append(state)
        self.counters.preemptions_swapped += 1

    def _foretell(self, now: float) -> None:
        """Tell the policy when paused requests run next: one after the other, at the pace of the last entries."""
        for turn in range(len(self.paused), 0, -1):
            self.runtime.cache.residency.expect(self.paused[turn - 1].blocks, now + turn * self._entry_gap_s)

    def _note_entry(self, now: float) -> None:
        self._entry_gap_s += ENTRY_SMOOTHING * (now - self._last_entry_s - self._entry_gap_s)
        self._last_entry_s = now
