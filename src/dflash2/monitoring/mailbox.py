"""Questions from other threads to the one that drives the runtime, answered between two steps."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Generic, TypeVar

Owner = TypeVar("Owner")
T = TypeVar("T")


class Mailbox(Generic[Owner]):
    """Holds questions until the owner comes by. A question is a function of the owner; it must be quick."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._questions: deque[tuple[Callable[[Owner], Any], Future[Any]]] = deque()

    def put(self, question: Callable[[Owner], T]) -> Future[T]:
        """Leave a question; from any thread. Cancelling the future withdraws it."""
        future: Future[T] = Future()
        with self._lock:
            while self._questions and self._questions[0][1].cancelled():
                self._questions.popleft()  # an owner that never comes by again must not make this grow
            self._questions.append((question, future))
        return future

    async def ask(self, question: Callable[[Owner], T]) -> T:
        """Leave a question and wait for the answer, or for what answering it raised."""
        return await asyncio.wrap_future(self.put(question))

    def answer(self, owner: Owner) -> None:
        """Answer everything that was asked. Costs next to nothing when nothing was."""
        while self._questions:
            with self._lock:
                question, future = self._questions.popleft()
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(question(owner))
                except Exception as error:  # noqa: BLE001 - raised again where the question was asked
                    future.set_exception(error)
