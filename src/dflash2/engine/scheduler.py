"""Which requests take part in the next step, and with how many tokens."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from dataclasses import dataclass

import numpy as np

from dflash2.cache.sequence import Residency
from dflash2.engine.batch import StepBatch
from dflash2.engine.request_state import RequestState, branch_id
from dflash2.errors import DeadlineExceeded
from dflash2.runtime import Runtime
from dflash2.types import IntArray

STEP_SMOOTHING = 0.1
"""Weight of the newest step in the average duration of a step."""
LOAD_PATIENCE = 0.5
"""Share of a step's duration that the others wait for a request whose blocks are on their way."""


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    """Bounds of a step and of the waits."""

    max_batch_tokens: int
    max_running: int
    quantum_tokens: int
    """Decode steps for which a resident request keeps its place while others wait for it."""
    admission_timeout_s: float
    load_timeout_s: float = 30.0
    """A request whose blocks have not arrived in HBM by then recomputes what is missing."""


@dataclass(slots=True)
class SchedulerCounters:
    """What the scheduler did since its start."""

    admitted_requests: int = 0
    timed_out_requests: int = 0
    preemptions_swapped: int = 0
    preemptions_recomputed: int = 0
    load_timeouts: int = 0
    peak_running_tokens: int = 0
    """Most tokens whose KV unfinished requests held at one time, on all tiers."""


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

    @property
    def num_running(self) -> int:
        return len(self.paused) + len(self.resident)

    def every(self) -> list[RequestState]:
        """All requests held, running ones first."""
        return [*self.resident, *self.paused, *self.waiting]

    def schedule(self, now: float) -> tuple[list[RequestState], StepBatch] | None:
        """Pick the next step; None if nobody can take part yet."""
        self._admit(now)
        self._make_resident(now)
        self._advance_loads(now)
        self._await_loads(now)
        picked = self._pick(now)
        self._note_running()
        return (list(picked), _pack(picked)) if picked else None

    def note_step(self, seconds: float) -> None:
        """A model step took so long."""
        self._step_s += STEP_SMOOTHING * (seconds - self._step_s)

    def remove(self, state: RequestState) -> None:
        """Take a request out, whatever it was doing, and give up all it holds but its cached blocks."""
        for queue in (self.waiting, self.paused, self.resident):
            if state in queue:
                queue.remove(state)
        if state.sequence is not None:
            self.runtime.close(state.sequence)

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
                f"the server was too busy: no room for this request within {self.limits.admission_timeout_s:.0f} s"
            )
            self.counters.timed_out_requests += 1
        return expired

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

    def _await_loads(self, now: float) -> None:
        """Rather than run a step without those that are entering, wait for them a fraction of its time."""
        end = now + LOAD_PATIENCE * self._step_s
        while any(state.blocks.residency is Residency.ENTERING for state in self.resident):
            left = end - self.runtime.clock()
            if left <= 0 or not self.runtime.cache.mover.num_in_flight:
                return
            self.runtime.wait(left)
            self._advance_loads(now)

    def _pick(self, now: float) -> dict[RequestState, int]:
        """Requests of the step with their numbers of new tokens: decodes first, those with the shortest turn ahead."""
        budget = self.limits.max_batch_tokens
        ready = [s for s in self.resident if s.blocks.residency is Residency.RESIDENT and s.num_uncomputed]
        ready.sort(key=lambda state: (state.is_prefilling, state.turn_tokens))
        picked: dict[RequestState, int] = {}
        begun: set[bytes] = set()
        for state in ready:
            if budget == 0 or state not in self.resident or not self._may_compute(state, begun):
                continue
            count = min(state.num_uncomputed, budget)
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


def _pack(picked: dict[RequestState, int]) -> StepBatch:
    first = [state.blocks.num_tokens for state in picked]
    counts = list(picked.values())
    last = [start + count for start, count in zip(first, counts, strict=True)]
    spans = list(zip(picked, first, last, strict=True))
    return StepBatch(
        token_ids=np.concatenate([state.tokens[start:end] for state, start, end in spans]),
        positions=np.concatenate([np.arange(start, end, dtype=np.int32) for _, start, end in spans]),
        query_lens=_ints(counts),
        context_lens=_ints(last),
        block_tables=[state.blocks.hbm_slots for state in picked],
        wants_logits=np.array([end == state.num_tokens for state, _, end in spans], np.bool_),
        adapter_slots=[state.adapter_slot for state in picked],
    )


def _ints(values: list[int]) -> IntArray:
    return np.array(values, np.int32)
