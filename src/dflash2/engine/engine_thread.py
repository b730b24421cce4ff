"""The thread that owns a synchronous engine: runs its steps while there is work, and sleeps otherwise."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

from dflash2.engine.base import Engine, GenerationRequest, TokenOutput
from dflash2.errors import CapacityError, ModelError, RequestError
from dflash2.pipeline.handoff import TokenSpan

logger = logging.getLogger(__name__)

EMPTY_STEP_PAUSE_S = 0.001
"""Pause after a step that did nothing (every request waits for admission or for a transfer), so as not to spin."""
FINISH_TIMEOUT_S = 5.0
"""How long cancelled requests get at the end for the steps in which they release what they hold."""


class EngineListener(Protocol):
    """Told in the event loop what happened in the thread."""

    def on_outputs(self, outputs: list[TokenOutput]) -> None:
        """What one step produced, however many requests it served."""

    def on_refused(self, refused: list[tuple[str, Exception]]) -> None:
        """Requests, by id, that the engine did not take, and why."""

    def on_end(self, failure: Exception | None) -> None:
        """The engine takes no more steps; ``failure``: what broke it, None where it was stopped."""


class EngineThread:
    """Takes commands from any thread and carries them out before the next step.

    Args:
        engine: touched by this thread only, and closed when it ends.
        listener: told by callbacks to the loop.
        idle_interval_s: how often ``engine.idle()`` is called while there is no work.
    """

    def __init__(self, engine: Engine, listener: EngineListener, idle_interval_s: float) -> None:
        self._engine = engine
        self._listener = listener
        self._idle_interval_s = idle_interval_s
        # Shared, guarded by the condition.
        self._wake = threading.Condition()
        self._inbox: deque[Callable[[], None]] = deque()
        self._stopping = False
        # Owned by the thread.
        self._refused: list[tuple[str, Exception]] = []
        self._spans: dict[str, TokenSpan] = {}
        """Of the requests in the engine; released when it is done with them."""
        self._busy_s = 0.0
        self._last_idle_s = 0.0
        self._stalled = False
        self._turn_began_s: float | None = None
        """Written by the thread, read by anybody: when the turn that is under way began."""
        self._thread = threading.Thread(target=self._run, name="dflash2-engine", daemon=True)

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        """Start it, once; the listener is told in ``loop``."""
        self._loop = loop
        self._thread.start()

    def add(self, request: GenerationRequest) -> None:
        """Give the engine a request before its next step."""
        self.submit(partial(self._add, request))

    def submit(self, command: Callable[[], None]) -> None:
        """Run ``command`` in the thread before its next step."""
        with self._wake:
            self._inbox.append(command)
            self._wake.notify()

    def stop(self) -> None:
        """End after the step that is under way. Idempotent."""
        with self._wake:
            self._stopping = True
            self._wake.notify()

    def join(self, timeout_s: float) -> bool:
        """Wait for its end; False if it has not come."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def call_loop(self, callback: Callable[..., None], *args: Any) -> None:
        """Have the loop call back; from the thread."""
        try:
            self._loop.call_soon_threadsafe(callback, *args)
        except RuntimeError:
            if not self._loop.is_closed():
                raise
            logger.warning("the event loop was closed before the engine; its consumers are gone")
            self.stop()

    @property
    def turn_s(self) -> float | None:
        """How long the turn that is under way has taken; None between turns. From any thread."""
        began = self._turn_began_s
        return None if began is None else max(0.0, time.monotonic() - began)

    @property
    def busy_s(self) -> float:
        """Seconds spent in turns so far, the one under way included. From any thread."""
        return self._busy_s + (self.turn_s or 0.0)

    def _run(self) -> None:
        failure: Exception | None = None
        try:
            while self._wait():
                self._turn()
            self._finish()
        except Exception as error:
            logger.exception("the engine failed; it serves no request any more")
            failure = error
        self.call_loop(self._listener.on_end, failure)  # before close(), which may take long
        try:
            self._engine.close()
        except Exception:
            logger.exception("the engine did not close properly")
        for request_id in list(self._spans):
            self._release(request_id)

    def _wait(self) -> bool:
        """Sleep while there is nothing to do. False when it is time to stop."""
        with self._wake:
            if not self._inbox and not self._stopping:
                if not self._engine.has_work:
                    self._wake.wait(self._idle_interval_s)
                elif self._stalled:
                    self._wake.wait(EMPTY_STEP_PAUSE_S)
            return not self._stopping

    def _turn(self) -> None:
        now = time.monotonic()
        if self._engine.has_work or self._inbox:
            self._turn_began_s = now
        self._work(now)
        if self._turn_began_s is not None:
            self._turn_began_s = None
            self._busy_s += time.monotonic() - now

    def _work(self, now: float) -> None:
        self._run_commands()
        if self._engine.has_work:
            outputs = self._step()
            self._stalled = not outputs and time.monotonic() - now < EMPTY_STEP_PAUSE_S
            if outputs:
                self.call_loop(self._listener.on_outputs, outputs)
        elif now - self._last_idle_s >= self._idle_interval_s:
            self._last_idle_s = now
            self._engine.idle()

    def _finish(self) -> None:
        """The consumers have left: give cancelled requests the steps they need to release what they hold."""
        self._run_commands()
        deadline = time.monotonic() + FINISH_TIMEOUT_S
        while self._engine.has_work and time.monotonic() < deadline:
            self._step()

    def _step(self) -> list[TokenOutput]:
        outputs = self._engine.step()
        for output in outputs:
            if output.ends_request:
                self._release(output.request_id)
        return outputs

    def _run_commands(self) -> None:
        with self._wake:
            commands, self._inbox = self._inbox, deque()
        for command in commands:
            command()
        if self._refused:
            self.call_loop(self._listener.on_refused, self._refused)
            self._refused = []

    def _add(self, request: GenerationRequest) -> None:
        if request.span is not None:
            self._spans[request.request_id] = request.span
        try:
            self._engine.add(request)
        except (CapacityError, ModelError, RequestError) as error:
            self._refused.append((request.request_id, error))
            self._release(request.request_id)

    def _release(self, request_id: str) -> None:
        """The engine reads the request's tokens no more."""
        span = self._spans.pop(request_id, None)
        if span is not None:
            span.release()
