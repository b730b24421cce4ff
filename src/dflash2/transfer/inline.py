"""A transfer engine without threads: jobs run when their end is asked for. For replays, tests and debugging."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping

import numpy as np

from dflash2.errors import IntegrityError
from dflash2.pools.base import BlockPool
from dflash2.transfer.base import Completion, CopyJob
from dflash2.transfer.engine import build_routes, check_destinations, validate
from dflash2.transfer.jobs import Batch, PendingJob
from dflash2.transfer.staging import StagingBuffer
from dflash2.transfer.workers import InlineWorkers, Shares
from dflash2.types import BoolArray, Tier


class InlineTransferEngine:
    """Runs every queued job, whole and in order of submission, inside ``poll`` or ``wait``.

    Deterministic: the same calls give the same completions. An exception of a pool is not caught, so that a test sees
    it.

    Args:
        pools: the tiers there are; at least two. All with one layout.
        clock: seconds, for ``Completion.wall_s``; a replay passes its simulated clock.

    Raises:
        ValueError: the pools do not fit together.
    """

    def __init__(self, pools: Mapping[Tier, BlockPool], clock: Callable[[], float] = time.monotonic) -> None:
        self._routes = build_routes(pools)
        self._clock = clock
        stride = next(iter(pools.values())).layout.stride_bytes
        # One block at a time needs room for one.
        self._staging = StagingBuffer(stride, 1, stride) if any(r.staged for r in self._routes.values()) else None
        self._workers = InlineWorkers(_raise)
        self._queue: dict[int, PendingJob] = {}
        self._done: deque[Completion] = deque()
        self._next_ticket = 1
        self._closed = False

    def submit(self, job: CopyJob) -> int:
        """See ``TransferEngine.submit``. Raises as ``ThreadedTransferEngine.submit`` does."""
        validate(job, self._routes)
        if self._closed:
            raise RuntimeError("the transfer engine is closed")
        ticket = self._next_ticket
        self._next_ticket += 1
        self._queue[ticket] = PendingJob(ticket, job, self._clock(), len(job.src_slots))
        return ticket

    @property
    def is_pressed(self) -> bool:
        """Never: nothing is measured."""
        return False

    def poll(self) -> list[Completion]:
        """See ``TransferEngine.poll``; runs what is queued."""
        while self._queue:
            self._end(next(iter(self._queue)), run=True)
        ended = list(self._done)
        self._done.clear()
        return ended

    def wait(self, tickets: list[int], timeout_s: float) -> bool:
        """See ``TransferEngine.wait``; runs ``tickets`` and everything submitted before them."""
        while any(ticket in self._queue for ticket in tickets):
            self._end(next(iter(self._queue)), run=True)
        return True

    def cancel(self, ticket: int) -> bool:
        """See ``TransferEngine.cancel``."""
        if ticket not in self._queue:
            return False
        self._end(ticket, run=False)
        return True

    def close(self, timeout_s: float) -> None:
        """Cancel what is queued. Idempotent."""
        self._closed = True
        for ticket in list(self._queue):
            self._end(ticket, run=False)

    def check_integrity(self) -> None:
        """See ``TransferEngine.check_integrity``."""
        check_destinations([p.job for p in self._queue.values()] + [done.job for done in self._done])
        if self._staging is not None:
            self._staging.check_integrity(0)
        if any(pending.ticket != ticket for ticket, pending in self._queue.items()):
            raise IntegrityError("a queued job lies under another ticket")

    def _end(self, ticket: int, run: bool) -> None:
        pending = self._queue.pop(ticket)
        if run and pending.num_blocks:
            self._run(pending)
        wall_s = self._clock() - pending.submitted_at
        if pending.job.layers is not None:
            pending.job.layers.ended(bool(pending.ok.all()))
        self._done.append(Completion(ticket, pending.job, pending.ok, pending.bad_source, wall_s))

    def _run(self, pending: PendingJob) -> None:
        route = self._routes[(pending.job.src, pending.job.dst)]
        if not route.staged:
            whole = Batch(pending, 0, pending.num_blocks)
            pending.ok = self._workers.start(route.straight_step(whole), len(whole)).ok
            if route.straight_reads_source:
                pending.bad_source = ~pending.ok
            return
        for i in range(pending.num_blocks):
            gathered, stored = self._through_staging(Batch(pending, i, i + 1))
            pending.bad_source[i] = not gathered
            pending.ok[i] = gathered and stored

    def _through_staging(self, batch: Batch) -> tuple[bool, bool]:
        staging = self._staging
        chunk = None if staging is None else staging.try_acquire()
        if staging is None or chunk is None:
            raise IntegrityError("the staging chunk of the inline engine is taken")
        route = self._routes[(batch.pending.job.src, batch.pending.job.dst)]
        try:
            gathered: BoolArray = self._workers.start(route.gather_step(batch, chunk), 1).ok
            if not gathered[0]:
                return False, False
            shares: Shares = self._workers.start(route.scatter_step(batch, chunk, np.zeros(1, dtype=np.int32)), 1)
            return True, bool(shares.ok[0])
        finally:
            staging.release(chunk)


def _raise(error: Exception) -> None:
    raise error
