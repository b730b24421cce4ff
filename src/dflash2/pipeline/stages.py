"""What every stage of the pipeline has: places, a queue in front of it, and an account of both."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(slots=True)
class StageMeter:
    """What one stage has done. Written by one thread, read by anybody.

    ``enter``, then ``begin``, then ``end``; or ``drop`` by a request that leaves while it waits.
    """

    queued: int = 0
    """Requests that wait for the stage."""
    active: int = 0
    """Requests in it."""
    peak_queued: int = 0
    done: int = 0
    """Requests that went through, well or not."""
    cancelled: int = 0
    """Requests that left while they waited."""
    wait_s: float = 0.0
    """Time spent waiting for the stage, all requests together."""
    busy_s: float = 0.0
    """Time spent in it."""
    hidden_s: float = 0.0
    """Of this, while the model was running anyway."""

    def enter(self) -> None:
        self.queued += 1
        self.peak_queued = max(self.peak_queued, self.queued)

    def begin(self, waited_s: float) -> None:
        self.queued -= 1
        self.active += 1
        self.wait_s += waited_s

    def end(self, busy_s: float, hidden_s: float = 0.0) -> None:
        self.active -= 1
        self.done += 1
        self.busy_s += busy_s
        self.hidden_s += hidden_s

    def drop(self, waited_s: float) -> None:
        self.queued -= 1
        self.cancelled += 1
        self.wait_s += waited_s

    def passed(self, waited_s: float, busy_s: float) -> None:
        """A request went through that nobody saw waiting."""
        self.done += 1
        self.wait_s += waited_s
        self.busy_s += busy_s

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


class Stage:
    """So many requests at a time; the others wait in line, and their waiting is measured.

    Args:
        num_places: requests in the stage at a time.
        engine_busy_s: seconds that the model has been running so far.
        clock: seconds.
    """

    def __init__(
        self,
        num_places: int,
        engine_busy_s: Callable[[], float] = lambda: 0.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.meter = StageMeter()
        self._engine_busy_s = engine_busy_s
        self._places = asyncio.Semaphore(num_places)
        self._clock = clock

    @asynccontextmanager
    async def place(self) -> AsyncIterator[None]:
        """A place in the stage for the length of the block. Cancelling the wait leaves the line."""
        arrived = self._clock()
        self.meter.enter()
        try:
            await self._places.acquire()
        except BaseException:
            self.meter.drop(self._clock() - arrived)
            raise
        began, busy_before = self._clock(), self._engine_busy_s()
        self.meter.begin(began - arrived)
        try:
            yield
        finally:
            self._places.release()
            taken = self._clock() - began
            self.meter.end(taken, min(taken, self._engine_busy_s() - busy_before))
