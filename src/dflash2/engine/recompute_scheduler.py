"""HBM only: what does not fit is dropped and computed again. The fallback, and the setting to compare with."""

from __future__ import annotations

from dflash2.engine.request_state import RequestState
from dflash2.engine.scheduler import Scheduler


class RecomputeScheduler(Scheduler):
    """Admits a request when its prompt fits beside the others, and drops the youngest when a running one cannot grow.

    Dropped requests wait at the head of the queue; their full blocks stay cached until others need the room, so only
    what was really given up is computed again.
    """

    def upcoming(self) -> list[RequestState]:
        return []

    def leaving_next(self) -> list[RequestState]:
        return []

    def _admit(self, now: float) -> None:
        while self.waiting and self.num_running < self.limits.max_running:
            state = self.waiting[0]
            request = state.request
            adapter, salt = state.adapter_key, request.tenant_salt
            if not self.runtime.prompts.has_room_for(state.tokens, adapter=adapter, tenant_salt=salt):
                if state.admitted and self._drop_idle_beam(state.order):
                    continue
                return
            sequence = self.runtime.open_unreserved(
                state.sequence_id, state.tokens, adapter=adapter, tenant_salt=salt, traits=state.traits
            )
            entered = self.runtime.try_enter(sequence, state.num_tokens - sequence.num_tokens)
            assert entered
            self.waiting.popleft()
            if not state.admitted:
                state.num_cached_tokens = sequence.num_cached_tokens
                self._note_admitted(state, now)
            sequence.read_from(state.buffer)
            state.sequence = sequence
            self.resident.append(state)

    def _make_resident(self, now: float) -> None:
        """Admitted requests are resident from the start; one cut back after a fault enters again."""
        for state in list(self.paused):
            if self.runtime.try_enter(state.blocks, state.num_uncomputed):
                self.paused.remove(state)
                self.resident.append(state)

    def _on_no_room(self, state: RequestState) -> bool:
        """Drop the youngest; if that is the one that wants to grow, it goes itself."""
        youngest = max(self.resident, key=lambda one: (one.order, self.resident.index(one)))
        self._drop(youngest)
        return youngest is not state

    def _drop_idle_beam(self, order: int) -> bool:
        """Make room for a dropped request with a beam of a younger one, that waits for its dropped sisters.

        Otherwise the beams of two requests might hold each other up for good.
        """
        idle = [state for state in self.resident if state.order > order and not state.num_uncomputed]
        if idle:
            self._drop(max(idle, key=lambda state: state.order))
        return bool(idle)

    def _drop(self, state: RequestState) -> None:
        self.resident.remove(state)
        self._park(state)
        self.counters.preemptions_recomputed += 1

    def _park(self, state: RequestState) -> None:
        """Back to the queue, ahead of those that were never admitted, the oldest first."""
        if state.sequence is not None:
            self.runtime.drop(state.sequence)
            state.sequence = None
        place = sum(one.admitted and one.order <= state.order for one in self.waiting)
        self.waiting.insert(place, state)
