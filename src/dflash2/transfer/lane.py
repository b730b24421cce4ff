"""A lane: threads that move batches of certain routes, with workers under them that share each batch."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass

import numpy as np

from dflash2.transfer.jobs import Batch, JobQueue, PendingJob
from dflash2.transfer.pacing import WritePacer
from dflash2.transfer.route import Route
from dflash2.transfer.staging import StagingBuffer
from dflash2.transfer.stats import TransferStats
from dflash2.transfer.workers import InlineWorkers, OnError, ThreadWorkers
from dflash2.types import BoolArray, Tier, Urgency

FILE_FLIGHTS = 2
"""Batches under way at once to or from files, in each direction: while one is on the device the next is prepared."""
STAGING_TIMEOUT_S = 30.0
"""Longest wait for a staging chunk; chunks are held for one batch, so only a hanging device makes it this long."""


@dataclass(frozen=True, slots=True)
class LaneContext:
    """What all lanes of an engine share.

    Attributes:
        routes: by (source, destination).
        staging: the staging buffer, None where no route is staged.
        stats: counters.
        on_error: told of exceptions that a pool raised.
        clock: monotonic seconds, for statistics.
        on_job_end: called from a lane's thread with each ended job.
    """

    routes: Mapping[tuple[Tier, Tier], Route]
    staging: StagingBuffer | None
    stats: TransferStats
    on_error: OnError
    clock: Callable[[], float]
    on_job_end: Callable[[PendingJob], None]


class Lane:
    """Moves the batches of its queue.

    Args:
        name: of the threads.
        context: what lanes share.
        workers: share the work of a batch; the lane stops them.
        num_threads: batches under way at once, each moved by one thread from its start to its end.
        is_file_lane: True where the workers are for the NVMe side of a route, and copies to and from staging are this
            lane's own. With two threads one batch is on the device while the next is filled.
        pacer: for the lane that stores to NVMe.
    """

    def __init__(
        self,
        name: str,
        context: LaneContext,
        workers: ThreadWorkers | InlineWorkers,
        num_threads: int,
        is_file_lane: bool,
        pacer: WritePacer | None = None,
    ) -> None:
        self.queue = JobQueue()
        self._context = context
        self._inline = InlineWorkers(context.on_error)
        self._shared = workers
        self._is_file_lane = is_file_lane
        self._pacer = pacer
        self._lock = threading.Lock()
        self._alone = threading.Lock()
        self._landed_at = 0.0
        self._demand_flights = 0
        self._threads = [
            threading.Thread(target=self._run, name=f"{name}-{i}", daemon=True) for i in range(num_threads)
        ]
        for thread in self._threads:
            thread.start()

    def serves_demand(self) -> bool:
        """True while a batch that somebody waits for is queued or under way."""
        return self._demand_flights > 0 or self.queue.holds(Urgency.DEMAND)

    def close(self) -> None:
        """Take no more jobs; those queued are finished."""
        if self._pacer is not None:
            self._pacer.stop()
        self.queue.close()

    def join(self, timeout_s: float) -> bool:
        """Wait for the end; False if the lane hangs in the device."""
        deadline = time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        if any(thread.is_alive() for thread in self._threads):
            return False
        self._shared.stop()
        return self._shared.join(max(0.1, deadline - time.monotonic()))

    def fail(self, batch: Batch, reason: str) -> None:
        """End a batch of which nothing arrived."""
        self._context.stats.failed(reason, len(batch))
        route = self._route(batch)
        nothing: BoolArray = np.zeros(len(batch), dtype=np.bool_)
        self._record(batch, route, nothing, nothing, 0.0)

    def _run(self) -> None:
        while (batch := self.queue.take(self._max_blocks)) is not None:
            if self._pacer is None:
                self._move(batch)
            else:
                self._store_paced(batch, self._pacer)

    def _max_blocks(self) -> int | None:
        stride_bytes = next(iter(self._context.routes.values())).src.layout.stride_bytes
        return None if self._pacer is None else self._pacer.max_blocks(stride_bytes)

    def _store_paced(self, batch: Batch, pacer: WritePacer) -> None:
        """Store a batch when it may be; end it at once if it may not."""
        urgency = batch.pending.job.urgency
        with self._lock:
            may = pacer.try_spend(len(batch) * self._route(batch).dst.layout.stride_bytes, urgency)
        if not may:
            self.fail(batch, "endurance budget")
            return
        pacer.before_batch(urgency)
        # Under back-pressure one batch is under way: a second would only lie in the device, in the way of loads.
        with self._alone if pacer.is_pressed else nullcontext():
            self._move(batch)

    def _move(self, batch: Batch) -> None:
        demand = batch.pending.job.urgency is Urgency.DEMAND
        with self._lock:
            self._demand_flights += demand
        try:
            route, started_at = self._route(batch), self._context.clock()
            if route.staged:
                self._through_staging(batch, route, started_at)
            else:
                self._straight(batch, route, started_at)
        finally:
            with self._lock:
                self._demand_flights -= demand

    def _straight(self, batch: Batch, route: Route, started_at: float) -> None:
        workers = self._workers(Tier.NVME in route.tiers)
        if batch.pending.job.layers is not None:
            workers = self._inline  # one share: a layer has arrived when it has for every block
        shares = workers.start(route.straight_step(batch), len(batch))
        moved = shares.wait()
        failed = ~moved & ~shares.crashed
        bad_source = failed if route.straight_reads_source else np.zeros_like(moved)
        self._finish(batch, route, moved, bad_source, started_at)

    def _through_staging(self, batch: Batch, route: Route, started_at: float) -> None:
        """A thread holds one chunk at most, and waits for none while it holds one: no two wait for each other."""
        staging = self._context.staging
        chunk = None if staging is None else staging.acquire(STAGING_TIMEOUT_S)
        if staging is None or chunk is None:
            self.fail(batch, "staging timeout")
            return
        gather = self._workers(route.src.tier is Tier.NVME).start(route.gather_step(batch, chunk), len(batch))
        arrived = np.flatnonzero(gather.wait()).astype(np.int32)
        scatter = route.scatter_step(batch, chunk, arrived)
        moved = self._workers(route.dst.tier is Tier.NVME).start(scatter, len(arrived)).wait()
        staging.release(chunk)
        ok: BoolArray = np.zeros(len(batch), dtype=np.bool_)
        ok[arrived[moved]] = True
        self._finish(batch, route, ok, ~gather.ok & ~gather.crashed, started_at)

    def _finish(self, batch: Batch, route: Route, ok: BoolArray, bad_source: BoolArray, started_at: float) -> None:
        stats, now = self._context.stats, self._context.clock()
        if self._pacer is not None:
            with self._lock:  # a batch has had the device to itself since the one before it landed
                took_s = now - max(started_at, self._landed_at)
                self._pacer.after_batch(int(ok.sum()) * route.dst.layout.stride_bytes, took_s)
                self._landed_at = now
        stats.failed("source", int(bad_source.sum()))
        stats.failed("destination", int((~ok & ~bad_source).sum()))
        self._record(batch, route, ok, bad_source, now - started_at)

    def _record(self, batch: Batch, route: Route, ok: BoolArray, bad_source: BoolArray, busy_s: float) -> None:
        pending, num_ok = batch.pending, int(ok.sum())
        pending.ok[batch.start : batch.stop] = ok
        pending.bad_source[batch.start : batch.stop] = bad_source
        num_bytes = num_ok * route.src.layout.block_bytes
        self._context.stats.batch_done(route.tiers, num_ok, len(batch) - num_ok, num_bytes, busy_s)
        with self._lock:
            pending.ended += len(batch)
            is_last = pending.ended == pending.num_blocks
        if is_last:
            self._context.on_job_end(pending)

    def _route(self, batch: Batch) -> Route:
        job = batch.pending.job
        return self._context.routes[(job.src, job.dst)]

    def _workers(self, on_file: bool) -> ThreadWorkers | InlineWorkers:
        return self._shared if on_file or not self._is_file_lane else self._inline
