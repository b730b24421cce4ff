"""Texts that arrive together are tokenised together, in threads."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from dflash2.pipeline.handoff import TokenIds
from dflash2.pipeline.stages import StageMeter
from dflash2.pipeline.tokenizer import LONG_TEXT_CHARS, Tokenizer

MAX_BATCH = 64
"""Texts in one call of the tokenizer."""


@dataclass(slots=True, eq=False)
class _Waiting:
    text: str
    add_special_tokens: bool
    arrived_s: float
    result: asyncio.Future[TokenIds]


@dataclass(slots=True)
class _Lane:
    """Texts of one size class; ``num_threads`` batches at a time."""

    num_threads: int
    queue: deque[_Waiting] = field(default_factory=deque)
    num_busy: int = 0
    """Workers that will look at the queue again."""
    workers: set[asyncio.Task[None]] = field(default_factory=set)
    """Their tasks, which asyncio itself does not keep alive."""


class TokeniseStage:
    """A batch is whatever waits when a thread is free: nobody waits for a batch to fill.

    Args:
        tokenizer: not owned.
        max_batch: texts in one call; 1 tokenises one after the other.
        engine_busy_s: seconds that the model has been running so far; work done meanwhile costs nobody time.
        clock: seconds.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        max_batch: int = MAX_BATCH,
        engine_busy_s: Callable[[], float] = lambda: 0.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.meter = StageMeter()
        self._tokenizer = tokenizer
        self._max_batch = max_batch
        self._engine_busy_s = engine_busy_s
        self._clock = clock
        self._short = _Lane(tokenizer.num_threads)
        self._long = _Lane(1)

    async def encode(self, text: str, *, add_special_tokens: bool) -> TokenIds:
        """The token ids of a text. Cancelling leaves the line."""
        result: asyncio.Future[TokenIds] = asyncio.get_running_loop().create_future()
        waiting = _Waiting(text, add_special_tokens, self._clock(), result)
        lane = self._long if len(text) > LONG_TEXT_CHARS else self._short
        lane.queue.append(waiting)
        self.meter.enter()
        if lane.num_busy < lane.num_threads:
            lane.num_busy += 1
            worker = asyncio.create_task(self._work(lane))
            lane.workers.add(worker)
            worker.add_done_callback(lane.workers.discard)
        try:
            return await result
        except asyncio.CancelledError:
            if waiting in lane.queue:
                lane.queue.remove(waiting)
                self.meter.drop(self._clock() - waiting.arrived_s)
            raise

    async def _work(self, lane: _Lane) -> None:
        """Batches until nobody waits.

        Who finds the line empty leaves at once: a text that comes before the task is known to have ended needs another.
        """
        try:
            await self._work_off(lane)
        finally:
            lane.num_busy -= 1

    async def _work_off(self, lane: _Lane) -> None:
        while lane.queue:
            batch = self._next_batch(lane)
            began, busy_before = self._clock(), self._engine_busy_s()
            for waiting in batch:
                self.meter.begin(began - waiting.arrived_s)
            texts = [waiting.text for waiting in batch]
            encode = partial(self._tokenizer.encode_batch, texts, add_special_tokens=batch[0].add_special_tokens)
            try:
                encoded = await self._tokenizer.run(encode, max(map(len, texts)))
            except BaseException as error:
                for waiting in batch:
                    _settle(waiting.result, error)
                if not isinstance(error, Exception):
                    raise
            else:
                for waiting, tokens in zip(batch, encoded, strict=True):
                    _settle(waiting.result, tokens)
            finally:
                taken = self._clock() - began
                hidden = min(taken, self._engine_busy_s() - busy_before)
                for _ in batch:
                    self.meter.end(taken / len(batch), hidden / len(batch))

    def _next_batch(self, lane: _Lane) -> list[_Waiting]:
        """The first in line, and those right behind it that want the same treatment."""
        batch = [lane.queue.popleft()]
        while lane.queue and len(batch) < self._max_batch:
            if lane.queue[0].add_special_tokens != batch[0].add_special_tokens:
                break
            batch.append(lane.queue.popleft())
        return batch


def _settle(result: asyncio.Future[TokenIds], outcome: TokenIds | BaseException) -> None:
    if result.done():
        return  # its request was cancelled meanwhile
    if isinstance(outcome, asyncio.CancelledError):
        result.cancel()
    elif isinstance(outcome, BaseException):
        result.set_exception(outcome)
    else:
        result.set_result(outcome)
