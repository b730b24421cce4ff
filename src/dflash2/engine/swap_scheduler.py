"""More running requests than HBM holds: they take turns, and what leaves is swapped, never dropped."""

from __future__ import annotations

import time
from dataclasses import asdict
from typing import Any

from dflash2.cache.admission import Admission, WaitReason
from dflash2.cache.waiting import join
from dflash2.engine.demand import Demand
from dflash2.engine.promises import Promises
from dflash2.engine.request_state import RequestState
from dflash2.engine.scheduler import Scheduler
from dflash2.engine.scheduler_limits import SchedulerLimits
from dflash2.errors import RequestTooLarge
from dflash2.pipeline.stages import StageMeter
from dflash2.runtime import Runtime

ENTRY_SMOOTHING = 0.2
"""Weight of the newest gap in the average time between two entries."""
PATIENCE = 0.5
"""Share of ``admission_timeout_s`` after which smoothing holds a request back no longer."""


class SwapScheduler(Scheduler):
    """Every request is reserved on the tiers together before it starts; HBM is shared by turns.

    A turn lasts until the prompt is computed and ``quantum_tokens`` more tokens are produced. A request whose turn is
    over keeps its place until somebody needs it. Everybody gets a first turn as soon as the tiers have room and the
    first turn of somebody else is over; how many share HBM by further turns is for ``admission`` to say.

    Args:
        runtime: memory of this rank.
        limits: bounds of a step and of the waits.
        admission: who takes turns while HBM is short.
        promises: how much is reserved.
    """

    def __init__(self, runtime: Runtime, limits: SchedulerLimits, admission: Admission, promises: Promises) -> None:
        super().__init__(runtime, limits)
        self.admission = admission
        self.promises = promises
        self._demand = Demand(runtime, admission, limits.quantum_tokens)
        self.lookup_stage = StageMeter()
        self.estimate_stage = StageMeter()
        self._last_entry_s = runtime.clock()
        self._entry_gap_s = 1.0

    def upcoming(self) -> list[RequestState]:
        """Those first who have had no turn."""
        return sorted(self.paused, key=lambda state: state.turn_is_over)

    def leaving_next(self) -> list[RequestState]:
        """Resident requests while others may take their places, those with the longest turn behind them first."""
        if not any(self._is_entitled(state) for state in self.paused):
            return []
        return sorted(self.resident, key=lambda state: -state.turn_tokens)

    def expected_wait_s(self) -> float:
        return self.admission.expected_wait_s(len(self.waiting))

    def stats(self) -> dict[str, Any]:
        admission, promises = self.admission.counters, self.promises.counters
        stats = super().stats()
        stats["stages"] |= {"lookup": self.lookup_stage.as_dict(), "estimate": self.estimate_stage.as_dict()}
        stats["wait_reasons"]["smoothed"] = sum(state.is_held_back for state in self.paused)
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
            join(self.waiting, state)
        else:
            self.waiting.append(state)

    def _admit(self, now: float) -> None:
        """Let those in, in order, for whom the tiers have room."""
        while self.waiting:
            state = self.waiting[0]
            reason = self._try_admit(state, now)
            if reason is not None:
                state.wait_reason = reason
                return
            self.waiting.popleft()

    def _try_admit(self, state: RequestState, now: float) -> WaitReason | None:
        """Reserve for a request and open it, or say what it waits for."""
        if self.num_running >= self.limits.max_running:
            return WaitReason.SEATS
        if any(other.waits_for_growth for other in self.paused):
            return WaitReason.GROWTH
        request = state.request
        total = self.promises.total_tokens(state)
        new_tokens = total - state.num_tokens
        _, blocks = self.runtime.promises.needed_blocks(state.num_tokens, new_tokens, state.num_branches)
        ledger = self.runtime.ledger
        if blocks > ledger.num_free:  # running requests may turn out not to need all they have
            self.promises.give_back((*self.resident, *self.paused))
        if state.wait_reason is WaitReason.ROOM and blocks > ledger.num_free:
            return WaitReason.ROOM  # it was refused before, and counted then
        try:
            sequence = self.runtime.open(
                request.request_id,
                state.tokens,
                new_tokens,
                num_branches=state.num_branches,
                adapter=state.adapter_key,
                tenant_salt=request.tenant_salt,
                traits=state.traits,
            )
        except RequestTooLarge:  # the tiers have lost slots since it was accepted: its deadline ends it
            return WaitReason.ROOM
        if sequence is None:
            return WaitReason.ROOM
        self.runtime.prompts.forget_arrival(state.sequence_id)
        sequence.read_from(state.buffer)
        state.sequence = sequence
        state.promised_tokens = total
        state.turn_is_over = state.takes_turns = state.is_held_back = False
        self.admission.note_admitted(now)
        if not state.admitted:
            state.num_cached_tokens = sequence.num_cached_tokens
            self._note_admitted(state, now)
        if self.limits.short_first:
            join(self.paused, state)
        else:
            self.paused.append(state)
        return None

    def _make_resident(self, now: float) -> None:
        """Let paused requests in, in order; those whose turn is over make room for the first that is entitled to it.

        Nobody passes one that finds no room, except for small requests in their lane, and for those who are entitled to
        a place where one before them is not.
        """
        if self.admission.smooths and (self.paused or self.admission.under_pressure):
            self._demand.note(self.resident, self.paused, self.waiting, short_first=self.limits.short_first)
        changed = is_full = is_taken = False
        for state in self.upcoming():
            if not state.num_uncomputed or (is_taken and not self._fits_lane(state)):
                continue
            entitled = self._may_displace(state, now)
            if (is_full and not entitled and not self._fits_lane(state)) or not self._cover_turn(state):
                continue
            while not (enters := self._try_enter(state)):
                over = self._longest_over() if entitled else None
                if over is None:
                    break
                self._pause(over, now)
                changed = True
            if enters:
                self._seat(state, now)
                changed = True
            else:
                is_full, is_taken = True, is_taken or entitled
        if changed:
            self._foretell(now)
        if self.paused and not any(state.num_uncomputed for state in self.resident):
            self._end_standstill()

    def _seat(self, state: RequestState, now: float) -> None:
        self.paused.remove(state)
        state.turn_tokens = 0
        state.turn_is_over = state.is_held_back = False
        if state.is_small:
            self.admission.note_small(len(state.blocks.block_ids) + state.blocks.growth_blocks)
        self._note_entry(now)
        self.resident.append(state)

    def _is_entitled(self, state: RequestState) -> bool:
        """To its first turn and to the rest of one that was cut short; to more only with those who take turns.

        Branches of one request wait for each other, so they always take turns.
        """
        takes_turns = state.takes_turns or state.num_branches > 1 or not self.admission.under_pressure
        return takes_turns or not state.turn_is_over

    def _may_displace(self, state: RequestState, now: float) -> bool:
        """Whether somebody whose turn is over has to make room for a paused request."""
        if self._is_entitled(state):
            return True
        if not self.admission.holds_back:
            state.takes_turns = self.admission.lets_in(self._demand.unshared_blocks(state))
        is_overdue = now - state.paused_s >= PATIENCE * self.limits.admission_timeout_s
        state.is_held_back = not state.takes_turns and not is_overdue
        return not state.is_held_back

    def _fits_lane(self, state: RequestState) -> bool:
        """A small request goes into what the others leave free, past those who wait."""
        needed = len(state.blocks.block_ids) + self._demand.growth_blocks(state)
        return state.is_small and needed <= self.admission.lane_blocks

    def _try_enter(self, state: RequestState) -> bool:
        left_free = 0 if self._fits_lane(state) or not self.resident else self.admission.lane_blocks
        if left_free:
            growth = self._demand.growth_blocks(state) + left_free
            if not self.runtime.cache.residency.fits(state.blocks.block_ids, growth):
                return False
        return self.runtime.try_enter(state.blocks, self._demand.turn_tokens(state))

    def _cover_turn(self, state: RequestState) -> bool:
        """Extend the request's reservation to what its next turn needs; if that cannot be, it waits and is counted."""
        covered = self.promises.try_cover(state, state.blocks.num_tokens + self._demand.turn_tokens(state))
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
            self._pause(state, now)  # it comes back when its reservation can be extended
            return False
        return super()._try_grow(state, count, now)

    def _on_no_room(self, state: RequestState) -> bool:
        """Its turn ends here: it is swapped at this step boundary and comes back with room for a whole turn."""
        if state.turn_tokens < self.limits.quantum_tokens:
            self.counters.unplanned_swaps += 1
        self._pause(state, self.runtime.clock())
        return False

    def _park(self, state: RequestState) -> None:
        self.paused.append(state)

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

    def _pause(self, state: RequestState, now: float) -> None:
        state.turn_is_over = state.turn_tokens >= self.limits.quantum_tokens
        state.paused_s = now
        self.runtime.pause(state.blocks)
        self.resident.remove(state)
        self.paused.append(state)
        self.counters.preemptions_swapped += 1

    def _foretell(self, now: float) -> None:
        """Tell the policy when paused requests run next: one after the other, at the pace of the last entries."""
        line = self.upcoming()
        for turn in range(len(line), 0, -1):
            self.runtime.cache.residency.expect(line[turn - 1].blocks, now + turn * self._entry_gap_s)

    def _note_entry(self, now: float) -> None:
        self._entry_gap_s += ENTRY_SMOOTHING * (now - self._last_entry_s - self._entry_gap_s)
        self._last_entry_s = now
