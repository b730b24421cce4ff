"""Requests with a LoRA adapter: they wait here, beside the scheduler, until the adapter is on the device."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Any

from dflash2.engine.request_state import RequestState
from dflash2.errors import DeadlineExceeded, ModelError, RequestError
from dflash2.pipeline.adapter_cache import AdapterCache
from dflash2.pipeline.adapter_file import AdapterSpec
from dflash2.pipeline.adapter_registry import AdapterRegistry
from dflash2.pipeline.stages import StageMeter

PATIENCE_S = 2.0
"""So long others may go on taking adapters that are on the device while somebody waits for a place there."""
CLOSE_TIMEOUT_S = 2.0
"""How long the end waits for an adapter that is being read."""


@dataclass(frozen=True, slots=True)
class _Waiting:
    state: RequestState
    spec: AdapterSpec
    since_s: float


class Adapters:
    """The engine's side of LoRA. Belongs to the engine's thread, except for ``registry``.

    A request holds its adapter from here to its end, so it is pinned while it waits for memory, runs or is swapped.
    Requests for the base model never come here.

    Args:
        registry: which names there are.
        cache: where the weights are; owned from here on.
    """

    def __init__(self, registry: AdapterRegistry, cache: AdapterCache) -> None:
        self.registry = registry
        self.cache = cache
        self._waiting: deque[_Waiting] = deque()
        self.stage = StageMeter()
        """Waiting for adapters."""
        self._held: dict[str, AdapterSpec] = {}
        """By request."""

    def spec_of(self, name: str) -> AdapterSpec:
        """Raises RequestError: there is no adapter of that name (any more)."""
        spec = self.registry.get(name)
        if spec is None:
            raise RequestError(f"there is no adapter {name!r}", param="model")
        return spec

    def add(self, state: RequestState, spec: AdapterSpec, now: float) -> None:
        """A request for an adapter has arrived."""
        self._waiting.append(_Waiting(state, spec, now))
        self.stage.enter()
        self.cache.want(spec, now)

    def take_ready(self, now: float) -> tuple[list[RequestState], list[RequestState]]:
        """Requests whose adapter is on the device and pinned for them, and those whose adapter cannot be loaded.

        Somebody who waits too long for a place on the device stops those that came later from keeping it occupied.
        """
        ready: list[RequestState] = []
        failed: list[RequestState] = []
        if not self._waiting:
            return ready, failed
        self.cache.poll(now)
        is_blocked = False
        for waiting in list(self._waiting):
            try:
                slot = None if is_blocked else self.cache.try_pin(waiting.spec)
            except ModelError as error:
                waiting.state.error = error
                failed.append(waiting.state)
                self.stage.drop(now - waiting.since_s)
                self._waiting.remove(waiting)
                continue
            if slot is not None:
                waiting.state.adapter_slot = slot
                self._held[waiting.state.request_id] = waiting.spec
                ready.append(waiting.state)
                self.stage.begin(now - waiting.since_s)
                self.stage.end(0.0)
                self._waiting.remove(waiting)
            elif now - waiting.since_s > PATIENCE_S and self.cache.waits_for_slot(waiting.spec):
                is_blocked = True
        return ready, failed

    def take_expired(self, now: float) -> list[RequestState]:
        """Requests that waited beyond their deadline."""
        expired = [waiting.state for waiting in self._waiting if now > waiting.state.deadline_s]
        for state in expired:
            self.remove(state)
            state.error = DeadlineExceeded("the server was too busy: the adapter found no place on the device in time")
        return expired

    def remove(self, state: RequestState) -> None:
        """Take a request out; without effect on one that does not wait here."""
        for waiting in self._waiting:
            if waiting.state is state:
                self._waiting.remove(waiting)
                self.cache.unwant(waiting.spec)
                self.stage.drop(0.0)
                return

    def release(self, request_id: str) -> None:
        """A request is over; without effect on one that held no adapter."""
        spec = self._held.pop(request_id, None)
        if spec is not None:
            self.cache.unpin(spec)
            if self.registry.get(spec.name) is not spec:
                self.cache.forget(spec)

    def forget(self, spec: AdapterSpec) -> None:
        """The adapter was unregistered."""
        self.cache.forget(spec)

    def stats(self, now: float) -> dict[str, Any]:
        """JSON-able."""
        return {
            **self.cache.stats(now),
            "registered": len(self.registry.all()),
            "waiting_requests": len(self._waiting),
            "stage": self.stage.as_dict(),
        }

    def close(self) -> None:
        """Stop what runs in the background, within ``CLOSE_TIMEOUT_S``. Idempotent."""
        self._waiting.clear()
        self.cache.close(CLOSE_TIMEOUT_S)
