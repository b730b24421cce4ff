"""A lane: one thread that moves batches of certain routes, with workers under it that share each batch."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from dflash2.transfer.jobs import Batch, JobQueue, PendingJob
from dflash2.transfer.pacing import WritePacer
from dflash2.transfer.route import Route
from dflash2.transfer.staging import StagingBuffer, StagingChunk
from dflash2.transfer.stats import TransferStats
from dflash2.transfer.workers import InlineWorkers, OnError, Shares, ThreadWorkers
from dflash2.types import BoolArray, IntArray, Tier, Urgency

FILE_FLIGHTS = 2
"""Batches under way at once to or from files: while one is on the device the next is prepared."""
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
        on_job_end: called from the lane's thread with each ended job.
    """

    routes: Mapping[tuple[Tier, Tier], Route]
    staging: StagingBuffer | None
    stats: TransferStats
    on_error: OnError
    clock: Callable[[], float]
    on_job_end: Callable[[PendingJob], None]


@dataclass(frozen=True, slots=True)
class _Flight:
    """A batch under way."""

    batch: Batch
    route: Route
    started_at: float
    chunk: StagingChunk | None
    first: Shares | None
    """For a staged route whose first step has ended: how it ended."""
    shares: Shares


class Lane:
    """Moves the batches of its queue.

    Args:
        name: of the thread.
        context: what lanes share.
        workers: share the work of a batch; the lane stops them.
        is_file_lane: True where the workers are for the NVMe side of a route, and copies to and from staging are this
            thread's. Two batches are then under way at once: while one is on the device the next is filled.
        pacer: for the lane that stores to NVMe.
    """

    def __init__(
        self,
        name: str,
        context: LaneContext,
        workers: ThreadWorkers | InlineWorkers,
        is_file_lane: bool,
        pacer: WritePacer | None = None,
    ) -> None:
        self.queue = JobQueue()
        self._context = context
        self._inline = InlineWorkers(context.on_error)
        self._shared = workers
        self._is_file_lane = is_file_lane
        self._depth = FILE_FLIGHTS if is_file_lane else 1
        self._pacer = pacer
        self._landed_at = 0.0
        self._demand_flights = 0
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

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
        started = time.monotonic()
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            return False
        self._shared.stop()
        return self._shared.join(max(0.1, timeout_s - (time.monotonic() - started)))

    def fail(self, batch: Batch, reason: str) -> None:
        """End a batch of which nothing arrived."""
        self._context.stats.failed(reason, len(batch))
        route = self._route(batch)
        nothing: BoolArray = np.zeros(len(batch), dtype=np.bool_)
        self._record(batch, route, nothing, nothing, 0.0)

    def _run(self) -> None:
        flights: deque[_Flight] = deque()
        while True:
            pressed = self._pacer is not None and self._pacer.is_pressed
            if not (pressed and flights):
                batch = self.queue.take(wait=not flights, max_blocks=self._max_blocks())
                if batch is not None:
                    self._take_off(batch, flights)
                    if len(flights) < self._depth:
                        continue
                elif not flights and self.queue.closed:
                    return
            if flights:
                self._land(flights.popleft())

    def _max_blocks(self) -> int | None:
        stride_bytes = next(iter(self._context.routes.values())).src.layout.stride_bytes
        return None if self._pacer is None else self._pacer.max_blocks(stride_bytes)

    def _take_off(self, batch: Batch, flights: deque[_Flight]) -> None:
        """Start a batch, or end it at once if it may not be stored."""
        pacer, urgency = self._pacer, batch.pending.job.urgency
        if pacer is not None:
            if not pacer.try_spend(len(batch) * self._route(batch).dst.layout.stride_bytes, urgency):
                self.fail(batch, "endurance budget")
                return
            while flights and pacer.must_wait(urgency):
                self._land(flights.popleft())
            pacer.before_batch(urgency)
        self._demand_flights += urgency is Urgency.DEMAND
        flight = self._launch(batch, flights)
        if flight is not None:
            flights.append(flight)
        else:
            self._demand_flights -= urgency is Urgency.DEMAND

    def _launch(self, batch: Batch, flights: deque[_Flight]) -> _Flight | None:
        route, started_at = self._route(batch), self._context.clock()
        if not route.staged:
            workers = self._workers(Tier.NVME in route.tiers)
            if batch.pending.job.layers is not None:
                workers = self._inline  # one share: a layer has arrived when it has for every block
            shares = workers.start(route.straight_step(batch), len(batch))
            return _Flight(batch, route, started_at, None, None, shares)
        chunk = self._acquire_chunk(flights)
        if chunk is None:
            self.fail(batch, "staging timeout")
            return None
        on_file = route.src.tier is Tier.NVME
        shares = self._workers(on_file).start(route.gather_step(batch, chunk), len(batch))
        if on_file:
            return _Flight(batch, route, started_at, chunk, None, shares)
        arrived = _positions(shares.wait())
        scatter = route.scatter_step(batch, chunk, arrived)
        stores = self._workers(route.dst.tier is Tier.NVME).start(scatter, len(arrived))
        return _Flight(batch, route, started_at, chunk, shares, stores)

    def _acquire_chunk(self, flights: deque[_Flight]) -> StagingChunk | None:
        """Never waits in line while this lane holds a chunk: two lanes would wait for each other for ever."""
        staging = self._context.staging
        if staging is None:
            return None
        chunk = staging.try_acquire()
        while chunk is None and flights:
            self._land(flights.popleft())
            chunk = staging.try_acquire()
        return staging.acquire(STAGING_TIMEOUT_S) if chunk is None else chunk

    def _land(self, flight: _Flight) -> None:
        moved = flight.shares.wait()
        self._demand_flights -= flight.batch.pending.job.urgency is Urgency.DEMAND
        if self._pacer is not None:
            now = self._context.clock()
            num_bytes = int(moved.sum()) * flight.route.dst.layout.stride_bytes
            self._pacer.after_batch(num_bytes, now - max(flight.started_at, self._landed_at))
            self._landed_at = now
        staging, route = self._context.staging, flight.route
        if flight.chunk is None or staging is None:
            failed = ~moved & ~flight.shares.crashed
            self._finish(flight, moved, failed if route.straight_reads_source else np.zeros_like(moved))
            return
        first = flight.first or flight.shares
        arrived = _positions(first.ok)
        if flight.first is None:
            scatter = route.scatter_step(flight.batch, flight.chunk, arrived)
            moved = self._inline.start(scatter, len(arrived)).wait()
        staging.release(flight.chunk)
        ok: BoolArray = np.zeros(len(flight.batch), dtype=np.bool_)
        ok[arrived[moved]] = True
        self._finish(flight, ok, ~first.ok & ~first.crashed)

    def _finish(self, flight: _Flight, ok: BoolArray, bad_source: BoolArray) -> None:
        stats = self._context.stats
        stats.failed("source", int(bad_source.sum()))
        stats.failed("destination", int((~ok & ~bad_source).sum()))
        self._record(flight.batch, flight.route, ok, bad_source, self._context.clock() - flight.started_at)

    def _record(self, batch: Batch, route: Route, ok: BoolArray, bad_source: BoolArray, busy_s: float) -> None:
        pending, num_ok = batch.pending, int(ok.sum())
        pending.ok[batch.start : batch.stop] = ok
        pending.bad_source[batch.start : batch.stop] = bad_source
        pending.ended += len(batch)
        num_bytes = num_ok * route.src.layout.block_bytes
        self._context.stats.batch_done(route.tiers, num_ok, len(batch) - num_ok, num_bytes, busy_s)
        if pending.ended == pending.num_blocks:
            self._context.on_job_end(pending)

    def _route(self, batch: Batch) -> Route:
        job = batch.pending.job
        return self._context.routes[(job.src, job.dst)]

    def _workers(self, on_file: bool) -> ThreadWorkers | InlineWorkers:
        return self._shared if on_file or not self._is_file_lane else self._inline


def _positions(ok: BoolArray) -> IntArray:
    return np.flatnonzero(ok).astype(np.int32)
