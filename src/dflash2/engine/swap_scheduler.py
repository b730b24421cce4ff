"""More running requests than HBM holds: they take turns, and what leaves is swapped, never dropped."""

from __future__ import annotations

from dflash2.engine.request_state import RequestState
from dflash2.engine.scheduler import Scheduler, SchedulerLimits
from dflash2.runtime import Runtime

ENTRY_SMOOTHING = 0.2
"""Weight of the newest gap in the average time between two entries."""


class SwapScheduler(Scheduler):
    """Every request is reserved on the tiers together before it starts; HBM is shared by turns.

    A turn lasts until the prompt is computed and ``quantum_tokens`` more tokens are produced. A request whose turn is
    over keeps its place until somebody needs it.
    """

    def __init__(self, runtime: Runtime, limits: SchedulerLimits) -> None:
        super().__init__(runtime, limits)
        self._last_entry_s = runtime.clock()
        self._entry_gap_s = 1.0

    def upcoming(self) -> list[RequestState]:
        return list(self.paused)

    def leaving_next(self) -> list[RequestState]:
        """Resident requests while others wait, those with the longest turn behind them first."""
        if not self.paused:
            return []
        return sorted(self.resident, key=lambda state: -state.turn_tokens)

    def _admit(self, now: float) -> None:
        while self.waiting and self.num_running < self.limits.max_running:
            state = self.waiting[0]
            request = state.request
            sequence = self.runtime.open(
                request.request_id,
                request.token_ids,
                state.max_total_tokens - state.num_prompt_tokens,
                num_branches=request.sampling.num_branches,
                adapter=state.adapter_key,
                tenant_salt=request.tenant_salt,
                traits=state.traits,
            )
            if sequence is None:
                return
            self.waiting.popleft()
            state.admitted = True
            state.sequence = sequence
            state.num_cached_tokens = sequence.num_cached_tokens
            self.paused.append(state)
            self.counters.admitted_requests += 1

    def _make_resident(self, now: float) -> None:
        """Let paused requests in, in order; those whose turn is over make room for the first that does not fit."""
        changed = False
        for state in [state for state in self.paused if state.num_uncomputed]:
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

    def _on_no_room(self, state: RequestState) -> bool:
        """Its turn ends here: it is swapped at this step boundary and comes back with room for a whole turn."""
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
