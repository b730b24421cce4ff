"""What the web routes show: statistics with what is read beside them, and questions to the runtime, with a deadline."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from dflash2.errors import DeadlineExceeded
from dflash2.monitoring.disk_watch import DiskWatch
from dflash2.monitoring.history import History
from dflash2.monitoring.observer import Observed, Observer
from dflash2.monitoring.policy_dial import PolicyDial

T = TypeVar("T")

ANSWER_TIMEOUT_S = 10.0
"""A step of the model may take seconds; one that takes longer than this hangs."""
DISK_TIMEOUT_S = 2.0


class View:
    """One server's view on its runtime. Belongs to the event loop.

    Args:
        observer: of the runtime; None where the engine has none of ours: there are figures then and nothing else.
        stats: nested statistics; by default those of the runtime.
    """

    def __init__(self, observer: Observer | None, stats: Callable[[], Awaitable[dict[str, Any]]] | None = None) -> None:
        self._observer = observer
        self._stats = stats or self._runtime_stats
        self._reading: asyncio.Future[dict[str, Any]] | None = None
        self._disk_stats: dict[str, Any] = {}
        self.dial = PolicyDial()

    @property
    def history(self) -> History | None:
        """None where none is kept."""
        return None if self._observer is None else self._observer.history

    async def collect(self) -> dict[str, Any]:
        """All statistics, with ``time`` (seconds since 1970) and, where there is NVMe, ``disk``.

        Raises:
            DeadlineExceeded: the runtime gives no answer.
        """
        stats = await self._stats()
        disk = self._observer.disk if self._observer is not None else None
        beside = {} if disk is None else {"disk": await self._read_disk(disk)}
        return {**stats, **beside, "time": time.time(), "history_enabled": self.history is not None}

    async def ask(self, question: Callable[[Observed], T]) -> T:
        """Have the thread that drives the runtime answer a question.

        Raises:
            DeadlineExceeded: it did not come by.
        """
        if self._observer is None:
            raise DeadlineExceeded("no runtime is observed here")
        try:
            return await asyncio.wait_for(self._observer.mailbox.ask(question), ANSWER_TIMEOUT_S)
        except asyncio.TimeoutError:
            raise DeadlineExceeded(f"the engine gave no answer within {ANSWER_TIMEOUT_S:.0f} s") from None

    async def _runtime_stats(self) -> dict[str, Any]:
        return await self.ask(lambda observed: observed.stats())

    async def _read_disk(self, disk: DiskWatch) -> dict[str, Any]:
        """In a thread, one at a time: a sick disk may take minutes. Until then the last known figures."""
        if self._reading is None:
            self._reading = asyncio.ensure_future(asyncio.to_thread(disk.read))
        reading = self._reading
        await asyncio.wait([reading], timeout=DISK_TIMEOUT_S)
        if reading.done():
            self._reading = None
            error = reading.exception()
            self._disk_stats = {"smart": {"unreadable": str(error)}} if error else reading.result()
        return self._disk_stats
