"""An engine that follows a script: no model, one token per running request and step."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import cycle
from typing import Any

from dflash2.engine.base import FinishReason, GenerationRequest, PrefetchReport, TokenOutput
from dflash2.types import IntArray

Script = Callable[[GenerationRequest], Iterator[object]]
"""What a request produces: token ids, a ``FinishReason`` to end with, or an exception that ``step()`` raises.
An exception wrapped in ``Failed`` is the failure of the one request."""


@dataclass(frozen=True)
class Failed:
    error: Exception
    reason: FinishReason = FinishReason.ERROR


def echo(request: GenerationRequest) -> Iterator[object]:
    """The prompt again and again."""
    return cycle(request.token_ids.tolist())


def says(*items: object) -> Script:
    """The same items for every request."""
    return lambda request: iter(items)


@dataclass
class _Running:
    request: GenerationRequest
    items: Iterator[object]
    num_cached: int
    num_output: int = 0


@dataclass
class FakeEngine:
    script: Script = echo
    max_context_tokens: int = 1_000
    refuse: Callable[[GenerationRequest], Exception | None] = lambda request: None
    resident_tokens: int | None = None
    """Less than the context: what HBM holds of one request."""
    step_s: float = 0.0
    gate: threading.Event | None = None
    """If set, a step waits for it."""

    running: dict[str, _Running] = field(default_factory=dict)
    added: list[GenerationRequest] = field(default_factory=list)
    cancelled: list[str] = field(default_factory=list)
    expected: list[tuple[list[int], str | None, str | None, float]] = field(default_factory=list)
    ended_answers: list[tuple[str, int]] = field(default_factory=list)
    num_steps: int = 0
    num_idle: int = 0
    num_stats: int = 0
    num_closed: int = 0
    threads: set[str] = field(default_factory=set)
    _seen: set[tuple[str | None, bytes]] = field(default_factory=set)
    _gone: list[TokenOutput] = field(default_factory=list)

    @property
    def max_resident_tokens(self) -> int:
        return self.max_context_tokens if self.resident_tokens is None else self.resident_tokens

    @property
    def has_work(self) -> bool:
        return bool(self.running or self._gone)

    def add(self, request: GenerationRequest) -> None:
        self._called()
        error = self.refuse(request)
        if error is not None:
            raise error
        key = (request.tenant_salt, request.token_ids.tobytes())
        num_cached = len(request.token_ids) - 1 if key in self._seen else 0
        self._seen.add(key)
        self.added.append(request)
        self.running[request.request_id] = _Running(request, self.script(request), num_cached)

    def end_answer(self, request_id: str, index: int) -> None:
        self._called()
        self.ended_answers.append((request_id, index))

    def cancel(self, request_id: str) -> None:
        self._called()
        self.cancelled.append(request_id)
        gone = self.running.pop(request_id, None)
        if gone is not None:
            self._gone.append(self._output(gone, None, FinishReason.CANCELLED))

    def prefetch(
        self, token_ids: IntArray, adapter: str | None, tenant_salt: str | None, ttl_s: float
    ) -> PrefetchReport:
        self._called()
        self.expected.append((token_ids.tolist(), adapter, tenant_salt, ttl_s))
        return PrefetchReport(len(token_ids), 4, 2, 1)

    def step(self) -> list[TokenOutput]:
        self._called()
        if self.gate is not None:
            assert self.gate.wait(240), "nobody opened the gate"
        time.sleep(self.step_s)
        self.num_steps += 1
        outputs, self._gone = self._gone, []
        for one in list(self.running.values()):
            output = self._next(one)
            if output is None:
                continue
            if output.finish_reason is not None:
                del self.running[one.request.request_id]
            outputs.append(output)
        return outputs

    def idle(self) -> None:
        self._called()
        self.num_idle += 1

    def stats(self) -> dict[str, Any]:
        self.num_stats += 1
        return {"fake": {"num_steps": self.num_steps, "num_running": len(self.running)}}

    def close(self) -> None:
        self._called()
        self.num_closed += 1

    def _called(self) -> None:
        self.threads.add(threading.current_thread().name)

    def _next(self, one: _Running) -> TokenOutput | None:
        """None where the script says so: a step in which the request makes no progress."""
        item = next(one.items)
        if item is None:
            return None
        if isinstance(item, Exception):
            raise item
        if isinstance(item, Failed):
            return self._output(one, None, item.reason, item.error)
        if isinstance(item, FinishReason):
            return self._output(one, None, item)
        assert isinstance(item, int)
        one.num_output += 1
        sampling = one.request.sampling
        reason = FinishReason.LENGTH if one.num_output >= sampling.max_tokens else None
        if item in sampling.stop_token_ids:
            reason = FinishReason.STOP
        return self._output(one, item, reason)

    @staticmethod
    def _output(
        one: _Running, token_id: int | None, reason: FinishReason | None, error: Exception | None = None
    ) -> TokenOutput:
        request = one.request
        return TokenOutput(request.request_id, token_id, reason, len(request.token_ids), one.num_cached, error)
