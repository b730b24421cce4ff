"""A synchronous engine in a thread of its own, served to asyncio: the loop's half."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable
from enum import Enum
from functools import partial
from typing import Any, TypeVar

from dflash2.engine.base import Engine, GenerationRequest, PrefetchReport, TokenOutput
from dflash2.engine.engine_thread import EngineThread
from dflash2.errors import DeadlineExceeded, EngineStopped, RequestError
from dflash2.types import IntArray

logger = logging.getLogger(__name__)

T = TypeVar("T")

STOP_TIMEOUT_S = 10.0
"""How long ``close()`` waits for the step that is under way."""
STALL_S = 120.0
"""A step that takes longer hangs: the longest chunk of a prompt takes seconds."""
ERRAND_TIMEOUT_S = 30.0
"""How long somebody who has an errand waits for the step that is under way."""
STATS_PATIENCE_S = 2.0
"""How long somebody who asks for statistics waits for the step that is under way."""


class EngineState(Enum):
    """Life of an ``AsyncEngine``; it only moves down this list."""

    NEW = "new"
    RUNNING = "running"
    CLOSING = "closing"
    """Running requests may finish; new ones are refused."""
    CLOSED = "closed"
    DEAD = "dead"
    """The engine raised; see ``failure``."""


class AsyncEngine:
    """Runs ``engine.step()`` in one thread while there is work, and sleeps otherwise.

    All methods and properties belong to the event loop that called ``start()``; the engine itself is touched by
    its thread only. What a step produced reaches the loop as one callback, however many requests it served.

    Args:
        engine: owned from here on; closed by ``close()`` or when it breaks.
        idle_interval_s: how often ``engine.idle()`` is called while there is no work.
    """

    def __init__(self, engine: Engine, *, idle_interval_s: float = 0.1) -> None:
        self._engine = engine
        self._thread = EngineThread(engine, self, idle_interval_s)
        self.max_context_tokens = engine.max_context_tokens
        self.max_resident_tokens = engine.max_resident_tokens
        self._state = EngineState.NEW
        self._failure: Exception | None = None
        self._streams: dict[str, asyncio.Queue[TokenOutput | Exception]] = {}
        self._drained = asyncio.Event()
        self._last_stats: dict[str, Any] = {}
        self._stats_waiters: list[asyncio.Future[dict[str, Any]]] = []
        self._errands: set[asyncio.Future[Any]] = set()

    @property
    def state(self) -> EngineState:
        """Where in its life the engine is."""
        return self._state

    @property
    def failure(self) -> Exception | None:
        """What killed the engine, if it is dead."""
        return self._failure

    @property
    def stalled_for_s(self) -> float | None:
        """How long the step that is under way has taken, if that is more than ``STALL_S``."""
        taken = self._thread.turn_s
        if taken is None or self._state not in (EngineState.RUNNING, EngineState.CLOSING):
            return None
        return taken if taken > STALL_S else None

    def busy_s(self) -> float:
        """Seconds spent in steps so far, the one under way included; from any thread."""
        return self._thread.busy_s

    @property
    def num_running(self) -> int:
        """Requests whose consumers are still there."""
        return len(self._streams)

    async def start(self) -> None:
        """Start the thread. Call once, from the loop that will consume."""
        self._loop = asyncio.get_running_loop()
        self._last_stats = self._engine.stats()
        self._state = EngineState.RUNNING
        self._thread.start(self._loop)

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[TokenOutput, None]:
        """The outputs of one request, up to and including the one with a ``finish_reason``.

        Closing the iterator early, or cancelling the task that waits in it, cancels the request.

        Raises:
            EngineStopped: the engine is not running, or stopped before the request ended.
            RequestTooLarge, RequestError: the engine refuses the request.
        """
        self._check_running()
        if request.request_id in self._streams:
            raise RequestError(f"request id {request.request_id!r} is in use", param="request_id")
        queue: asyncio.Queue[TokenOutput | Exception] = asyncio.Queue()
        self._streams[request.request_id] = queue
        self._thread.add(request)
        ended = False
        try:
            while not ended:
                item = await queue.get()
                if isinstance(item, Exception):
                    ended = True
                    raise item
                ended = item.ends_request
                yield item
        finally:
            del self._streams[request.request_id]
            if not ended:
                self._thread.submit(partial(self._engine.cancel, request.request_id))
            if not self._streams:
                self._drained.set()

    def end_answer(self, request_id: str, index: int) -> None:
        """End one answer of a request that is complete for its reader; without effect on what has ended."""
        self._thread.submit(partial(self._engine.end_answer, request_id, index))

    async def prefetch(
        self, token_ids: IntArray, adapter: str | None, tenant_salt: str | None, ttl_s: float
    ) -> PrefetchReport:
        """See ``Engine.prefetch``; also raises what ``between_steps`` does."""
        return await self.between_steps(partial(self._engine.prefetch, token_ids, adapter, tenant_salt, ttl_s))

    async def between_steps(self, work: Callable[[], T]) -> T:
        """Have the engine's thread do something short between two steps; its result or what it raised.

        Raises:
            EngineStopped: the engine is not running, or stopped before it came to this.
            DeadlineExceeded: the step under way takes longer than ``ERRAND_TIMEOUT_S``; the work is done after it.
        """
        self._check_running()
        result: asyncio.Future[T] = self._loop.create_future()
        self._errands.add(result)

        def settle(value: T | None, error: Exception | None) -> None:
            self._errands.discard(result)
            if result.done():
                return
            if error is not None:
                result.set_exception(error)
            else:
                result.set_result(value)  # type: ignore[arg-type]

        def run() -> None:
            try:
                value = work()
            except Exception as error:  # noqa: BLE001 - raised again where it is awaited
                self._thread.call_loop(settle, None, error)
            else:
                self._thread.call_loop(settle, value, None)

        self._thread.submit(run)
        try:
            return await asyncio.wait_for(result, ERRAND_TIMEOUT_S)
        except asyncio.TimeoutError:
            raise DeadlineExceeded(f"the engine's step took longer than {ERRAND_TIMEOUT_S:.0f} s") from None

    async def stats(self) -> dict[str, Any]:
        """The engine's statistics, taken between two steps.

        The last known ones once it stopped, or where the step under way takes longer than ``STATS_PATIENCE_S``.
        """
        if self._state in (EngineState.RUNNING, EngineState.CLOSING):
            waiter: asyncio.Future[dict[str, Any]] = self._loop.create_future()
            self._stats_waiters.append(waiter)
            if len(self._stats_waiters) == 1:
                self._thread.submit(self._take_stats)
            await asyncio.wait([waiter], timeout=STATS_PATIENCE_S)
        return self._last_stats

    async def close(self, timeout_s: float) -> bool:
        """Refuse new requests, let the running ones finish, then stop the thread and close the engine. Idempotent.

        Args:
            timeout_s: after this, requests still running end with ``EngineStopped``.

        Returns:
            True if the engine was closed; False if its thread is stuck in a step and was abandoned.
        """
        if self._state is EngineState.NEW:
            self._state = EngineState.CLOSED
            self._engine.close()
            return True
        if self._state is EngineState.RUNNING:
            self._state = EngineState.CLOSING
            await self._drain(timeout_s)
        self._thread.stop()
        if not await asyncio.to_thread(self._thread.join, STOP_TIMEOUT_S):
            logger.error("the engine's step does not end; gave up waiting after %.0f s", STOP_TIMEOUT_S)
            return False
        return True

    # On the loop.

    def _check_running(self) -> None:
        if self._state is EngineState.DEAD:
            raise EngineStopped(f"the engine failed: {self._failure!r}")
        if self._state is not EngineState.RUNNING:
            raise EngineStopped(f"the engine is {self._state.value}")

    async def _drain(self, timeout_s: float) -> None:
        """Wait until no consumer is left; after the deadline end what still runs."""
        if not self._streams:
            return
        self._drained.clear()
        try:
            await asyncio.wait_for(self._drained.wait(), timeout_s)
        except asyncio.TimeoutError:
            logger.warning("%d requests did not finish within %.0f s and are ended", len(self._streams), timeout_s)
            for request_id in self._streams:
                self._thread.submit(partial(self._engine.cancel, request_id))
            self._end_streams("the server is shutting down")

    def _end_streams(self, reason: str) -> None:
        for queue in self._streams.values():
            queue.put_nowait(EngineStopped(reason))

    def _set_stats(self, stats: dict[str, Any]) -> None:
        self._last_stats = stats
        waiters, self._stats_waiters = self._stats_waiters, []
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(stats)

    def _take_stats(self) -> None:
        """In the thread."""
        self._thread.call_loop(self._set_stats, self._engine.stats())

    # -- what the thread tells -----------------------------------------------------------------------------------

    def on_outputs(self, outputs: list[TokenOutput]) -> None:
        """See ``EngineListener``."""
        for output in outputs:
            queue = self._streams.get(output.request_id)
            if queue is not None:  # its consumer may have left
                queue.put_nowait(output)

    def on_refused(self, refused: list[tuple[str, Exception]]) -> None:
        """See ``EngineListener``."""
        for request_id, error in refused:
            queue = self._streams.get(request_id)
            if queue is not None:
                queue.put_nowait(error)

    def on_end(self, failure: Exception | None) -> None:
        """See ``EngineListener``."""
        self._failure = failure
        self._state = EngineState.CLOSED if failure is None else EngineState.DEAD
        self._end_streams("the engine is closed" if failure is None else f"the engine failed: {failure!r}")
        for result in self._errands:
            if not result.done():
                result.set_exception(EngineStopped("the engine stopped"))
        self._set_stats(self._last_stats)
