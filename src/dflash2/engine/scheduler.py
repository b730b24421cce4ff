"""Which requests take part in the next step, and with how many tokens."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections import Counter, deque
from dataclasses import asdict
from typing import Any

from dflash2.cache.admission import WaitReason
from dflash2.cache.sequence import Residency
from dflash2.cache.waiting import length_class
from dflash2.engine.batch import StepBatch, pack
from dflash2.engine.request_state import RequestState, branch_id
from dflash2.engine.scheduler_limits import SchedulerCounters, SchedulerLimits
from dflash2.errors import DeadlineExceeded, QueueFull
from dflash2.pipeline.stages import StageMeter
from dflash2.runtime import Runtime

STEP_SMOOTHING = 0.1
"""Weight of the newest step in the average duration of a step."""
FIRST_SHARE = 4
"""One part in so many of what a step has for prompts belongs to the one that came first."""
LOAD_PATIENCE = 0.5
"""Share of a step's duration that the others wait for a request whose blocks are on their way."""


class Scheduler(ABC):
    """Queues and residency. A subclass decides what happens when HBM is full.

    ``waiting`` is not admitted yet; ``paused`` is admitted but not pinned; ``resident`` is pinned, some of it perhaps
    still loading. All three in first-come order.
    """

    def __init__(self, runtime: Runtime, limits: SchedulerLimits) -> None:
        self.runtime = runtime
        self.limits = limits
        self.counters = SchedulerCounters()
        self.waiting: deque[RequestState] = deque()
        self.paused: deque[RequestState] = deque()
        self.resident: list[RequestState] = []
        self._step_s = 0.0
        self.reserved_stage = StageMeter()
        """Waiting for admission."""
        self.batch_stage = StageMeter()
        """From admission to the first step, and the time to put steps together."""

    def add(self, state: RequestState) -> None:
        """A request has arrived.

        Raises:
            QueueFull: too many wait already.
        """
        if len(self.waiting) >= self.limits.max_waiting:
            self.counters.refused_requests += 1
            raise QueueFull(
                f"{len(self.waiting)} requests wait already, which is the limit (scheduling.max_waiting)",
                retry_after_s=self.expected_wait_s(),
            )
        state.arrived_s = self.runtime.clock()
        self._queue(state)
        self.reserved_stage.enter()

    def expected_wait_s(self) -> float:
        """About how long the next request to arrive would wait for admission."""
        return self.limits.admission_timeout_s / 2

    @property
    def num_running(self) -> int:
        return len(self.paused) + len(self.resident)

    def every(self) -> list[RequestState]:
        """All requests held, running ones first."""
        return [*self.resident, *self.paused, *self.waiting]

    def schedule(self, now: float) -> tuple[list[RequestState], StepBatch] | None:
        """Pick the next step; None if nobody can take part yet."""
        began = time.perf_counter()
        self._admit(now)
        self._make_resident(now)
        self._advance_loads(now)
        waited = self._await_loads(now)
        picked = self._pick(now)
        self._note_running()
        batch = (list(picked), pack(picked)) if picked else None
        for state in picked:
            if state.admitted_s is not None:
                self.batch_stage.begin(now - state.admitted_s)
                self.batch_stage.end(0.0)
                state.admitted_s = None
        self.batch_stage.busy_s += time.perf_counter() - began - waited
        return batch

    def stats(self) -> dict[str, Any]:
        """Counters and gauges, JSON-able."""
        reasons = Counter(state.wait_reason.name.lower() for state in self.waiting)
        return {
            **asdict(self.counters),
            "waiting_requests": len(self.waiting),
            "paused_requests": len(self.paused),
            "resident_requests": len(self.resident),
            "wait_reasons": {reason.name.lower(): reasons[reason.name.lower()] for reason in WaitReason},
            "stages": {"reserved": self.reserved_stage.as_dict(), "batch": self.batch_stage.as_dict()},
        }

    def note_step(self, seconds: float) -> None:
        """A model step took so long."""
        self._step_s += STEP_SMOOTHING * (seconds - self._step_s)

    def remove(self, state: RequestState) -> None:
        """Take a request out, whatever it was doing, and give up all it holds but its cached blocks."""
        for queue in (self.waiting, self.paused, self.resident):
            if state in queue:
                queue.remove(state)
        if not state.admitted:
            self.reserved_stage.drop(self.runtime.clock() - state.arrived_s)
        elif state.admitted_s is not None:
            self.batch_stage.drop(self.runtime.clock() - state.admitted_s)
        if state.sequence is not None:
            self.runtime.close(state.sequence, state.outcome)
        else:
            self.runtime.end_dropped(state.sequence_id, state.outcome)

    def fork(self, state: RequestState, index: int) -> RequestState:
        """A second branch of a running request, under the same promise; it takes its turns on its own from now on."""
        sequence = (
            None if state.sequence is None else self.runtime.fork(state.sequence, branch_id(state.request_id, index))
        )
        twin = state.fork(index, sequence)
        if sequence is not None and state in self.resident and self.runtime.try_enter(sequence, 1):
            self.resident.append(twin)
        else:
            self._park(twin)
        return twin

    def take_expired(self, now: float) -> list[RequestState]:
        """Remove the requests that waited for admission beyond their deadline."""
        expired = [state for state in self.waiting if now > state.deadline_s and not state.admitted]
        for state in expired:
            self.remove(state)
            state.error = DeadlineExceeded(
                f"the server was too busy to begin with this request within {self.limits.admission_timeout_s:.0f} s: "
                f"{state.wait_reason.value}",
                retry_after_s=self.expected_wait_s(),
            )
            self.counters.timed_out_requests += 1
        return expired

    def _queue(self, state: RequestState) -> None:
        """Put a request that has just arrived among those that wait."""
        self.waiting.append(state)

    def _note_admitted(self, state: RequestState, now: float) -> None:
        """A request was admitted for the first time."""
        state.admitted = True
        state.admitted_s = now
        self.counters.admitted_requests += 1
        state.order = self.counters.admitted_requests
        self.reserved_stage.begin(now - state.arrived_s)
        self.reserved_stage.end(0.0)
        self.batch_stage.enter()

    @abstractmethod
    def upcoming(self) -> list[RequestState]:
        """Paused requests in the order in which they run next."""

    @abstractmethod
    def leaving_next(self) -> list[RequestState]:
        """Resident requests that have to make room soon."""

    @abstractmethod
    def _park(self, state: RequestState) -> None:
        """A branch that was forked and does not fit HBM now."""

    @abstractmethod
    def _admit(self, now: float) -> None:
        """Move requests from ``waiting`` on, as far as memory allows."""

    @abstractmethod
    def _make_resident(self, now: float) -> None:
        """Decide who is in HBM for the next step."""

    @abstractmethod
    def _on_no_room(self, state: RequestState) -> bool:
        """A resident request cannot grow because HBM is promised to others.

        Returns:
            True if it is worth trying again now.
        """

    def _advance_loads(self, now: float) -> None:
        """Carry on the requests that are entering; recover those whose blocks were lost or are late."""
        for state in list(self.resident):
            sequence = state.blocks
            if sequence.residency is not Residency.ENTERING or self.runtime.advance_entering(sequence):
                continue
            late = now - sequence.entered_s > self.limits.load_timeout_s
            if self.runtime.recover(sequence, give_up_loads=late) is not None:
                self.counters.load_timeouts += int(late)
                state.gave_up_loads |= late
                self.resident.remove(state)
                self.paused.appendleft(state)

    def _await_loads(self, now: float) -> float:
        """Rather than run a step without those that are entering, wait for them a fraction of its time.

        Returns:
            Seconds waited, on the wall.
        """
        began = time.perf_counter()
        end = now + LOAD_PATIENCE * self._step_s
        while any(state.blocks.residency is Residency.ENTERING for state in self.resident):
            left = end - self.runtime.clock()
            if left <= 0 or not self.runtime.cache.mover.num_in_flight:
                break
            self.runtime.wait(left)
            self._advance_loads(now)
        return time.perf_counter() - began

    def _pick(self, now: float) -> dict[RequestState, int]:
        """Requests of the step with their numbers of new tokens.

        Decodes come first, those with the shortest turn ahead, and prompts fill the rest of the budget. Short prompts
        are computed before long ones, but the one that came first always gets a share: it does not starve.
        """
        ready = [s for s in self.resident if s.blocks.residency is Residency.RESIDENT and s.num_uncomputed]
        prompts = [state for state in ready if state.is_prefilling]
        work = sorted((s for s in ready if not s.is_prefilling), key=lambda state: state.turn_tokens)
        budget = self.limits.max_batch_tokens
        shares: dict[RequestState, int] = {}
        if prompts and self.limits.short_first:
            left = max(1, budget - len(work))
            shares[prompts[0]] = min(prompts[0].num_uncomputed, max(1, left // FIRST_SHARE))
            prompts.sort(key=lambda state: length_class(state.num_uncomputed))
        picked: dict[RequestState, int] = {}
        begun: set[bytes] = set()
        for state in [*work, *prompts]:
            kept = sum(shares.values()) - shares.pop(state, 0)
            if budget <= kept or state not in self.resident or not self._may_compute(state, begun):
                continue
            count = min(state.num_uncomputed, budget - kept)  # after it has taken over what others computed
            if self._try_grow(state, count, now):
                picked[state] = count
                budget -= count
        # Making room for one may have taken out another that was picked before.
        return {state: count for state, count in picked.items() if state in self.resident}

    def _may_compute(self, state: RequestState, begun: set[bytes]) -> bool:
        """Not what another request has computed or is about to compute in this step: that is taken over instead.

        Args:
            state: a resident request.
            begun: keys of the first blocks that this step computes; added to.
        """
        if not state.is_prefilling or state.gave_up_loads:
            return True
        key = self.runtime.join_prefix(state.blocks, state.tokens)
        if state.num_output_tokens == 0:
            state.num_cached_tokens = state.blocks.num_cached_tokens
        if state.blocks.residency is not Residency.RESIDENT or key in begun:
            return False
        if key is not None:
            begun.add(key)
        return True

    def _try_grow(self, state: RequestState, count: int, now: float) -> bool:
        residency = self.runtime.cache.residency
        while not residency.try_extend(state.blocks, count):
            if not self._on_no_room(state):
                return False
        return residency.try_grow(state.blocks, count, now)

    def _note_running(self) -> None:
        tokens = sum(state.blocks.num_tokens for state in (*self.resident, *self.paused))
        self.counters.peak_running_tokens = max(self.counters.peak_running_tokens, tokens)
