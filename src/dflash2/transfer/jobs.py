"""Jobs waiting for a lane: by urgency, first come first served within one, taken a batch at a time."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from dflash2.transfer.base import CopyJob
from dflash2.types import BoolArray, Urgency

_ORDER = (Urgency.DEMAND, Urgency.DEMOTION, Urgency.SPECULATIVE)


@dataclass(slots=True)
class PendingJob:
    """A submitted job and what has become of its blocks so far.

    Attributes:
        ticket: its number.
        job: what to copy.
        submitted_at: clock reading.
        batch_blocks: most blocks of a batch of this job.
        ok, bad_source: see ``Completion``; filled batch by batch.
        taken: blocks handed to a lane so far.
        ended: blocks whose fate is known.
    """

    ticket: int
    job: CopyJob
    submitted_at: float
    batch_blocks: int
    ok: BoolArray = field(init=False)
    bad_source: BoolArray = field(init=False)
    taken: int = 0
    ended: int = 0

    def __post_init__(self) -> None:
        self.ok = np.zeros(self.num_blocks, dtype=np.bool_)
        self.bad_source = np.zeros(self.num_blocks, dtype=np.bool_)

    @property
    def num_blocks(self) -> int:
        return len(self.job.src_slots)


@dataclass(frozen=True, slots=True)
class Batch:
    """Blocks ``start`` to ``stop`` of a job."""

    pending: PendingJob
    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start


class JobQueue:
    """The jobs of one lane. Thread-safe."""

    def __init__(self) -> None:
        self._queues: dict[Urgency, deque[PendingJob]] = {urgency: deque() for urgency in _ORDER}
        self._changed = threading.Condition()
        self._closed = False

    def put(self, pending: PendingJob) -> None:
        """Add a job of at least one block."""
        with self._changed:
            self._queues[pending.job.urgency].append(pending)
            self._changed.notify_all()

    def holds(self, urgency: Urgency) -> bool:
        """True while a job of this urgency has blocks that were not taken."""
        with self._changed:
            return bool(self._queues[urgency])

    def take(self, max_blocks: Callable[[], int | None]) -> Batch | None:
        """Wait for a job, and take the next batch of the most urgent one; None if none will ever come (closed).

        Args:
            max_blocks: asked for the most blocks of the batch, where that is less than the job's own.
        """
        with self._changed:
            while True:
                for urgency in _ORDER:
                    if self._queues[urgency]:
                        return self._cut(self._queues[urgency], max_blocks())
                if self._closed:
                    return None
                self._changed.wait()

    def remove_unstarted(self, ticket: int | None = None) -> list[PendingJob]:
        """Take out the job ``ticket``, or all jobs, of which no batch was taken yet."""
        removed: list[PendingJob] = []
        with self._changed:
            for queue in self._queues.values():
                chosen = [p for p in queue if p.taken == 0 and ticket in (None, p.ticket)]
                for pending in chosen:
                    queue.remove(pending)
                removed += chosen
        return removed

    def remove_rest(self) -> list[Batch]:
        """Take out what is left of every job, as one batch each."""
        with self._changed:
            left = [Batch(p, p.taken, p.num_blocks) for queue in self._queues.values() for p in queue]
            for queue in self._queues.values():
                queue.clear()
            for batch in left:
                batch.pending.taken = batch.stop
            return left

    @property
    def closed(self) -> bool:
        with self._changed:
            return self._closed

    def close(self) -> None:
        """Wake the taker; it still takes what is queued."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _cut(self, queue: deque[PendingJob], max_blocks: int | None) -> Batch:
        pending = queue[0]
        start = pending.taken
        size = pending.batch_blocks if max_blocks is None else min(max_blocks, pending.batch_blocks)
        pending.taken = min(start + size, pending.num_blocks)
        if pending.taken == pending.num_blocks:
            queue.popleft()
        return Batch(pending, start, pending.taken)
