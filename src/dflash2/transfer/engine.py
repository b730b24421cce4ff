"""The transfer engine with threads: four lanes, one per direction and kind of device, so that in and out overlap."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping

import numpy as np

from dflash2.errors import IntegrityError
from dflash2.pools.base import BlockPool, spreads_itself
from dflash2.pools.faultlog import FaultLog
from dflash2.pools.page_memory import PageLock
from dflash2.transfer.base import Completion, CopyJob, burst_blocks
from dflash2.transfer.jobs import Batch, PendingJob
from dflash2.transfer.lane import FILE_FLIGHTS, Lane, LaneContext
from dflash2.transfer.pacing import PacingOptions, WritePacer
from dflash2.transfer.route import Route
from dflash2.transfer.staging import StagingBuffer
from dflash2.transfer.stats import TransferSnapshot, TransferStats
from dflash2.transfer.workers import InlineWorkers, ThreadWorkers
from dflash2.types import Tier

log = logging.getLogger(__name__)

DEFAULT_IO_THREADS = 8
DEFAULT_COPY_THREADS = 2
_COPY_LANES = ("swap-in", "swap-out")
_FILE_LANES = ("load", "store")
_MIN_COPY_SHARE_BYTES = 4 * 1024 * 1024
"""Below this a second thread costs more than it copies: it takes 0.1 ms and more until it runs."""
_MIN_STORE_SHARE_BYTES = 4 * 1024 * 1024
"""Where the pool has no threads of its own. Stores hash and write headers as well: with more threads these wait for
each other, and for the interpreter. 128 KiB blocks reach 0.57, 0.72 to 0.76, 0.85 to 0.91 and 0.94 of the disk's limit
with shares of 1, 2, 4 and 8 MiB at least.
Loads want many shares."""


class ThreadedTransferEngine:
    """Moves bytes between the given pools (see ``TransferEngine`` for the contract).

    Urgency orders the jobs of a lane; a job moves in batches of ``swap_batch_size`` blocks, so an urgent one waits for
    the batches under way at most. Loads from and stores to NVMe have threads of their own: a device that is slow to
    write does not hold the threads that read.

    Args:
        pools: the tiers there are; at least two. All with one layout.
        staging_bytes: budget of the staging buffer; only what can be used of it is allocated.
        swap_batch_size: most blocks moved as one burst (see ``base.burst_blocks``).
        io_threads: file threads in each direction, where the NVMe pool has none of its own.
        copy_threads: threads that copy between HBM and DRAM in each direction, where the pool has none of its own; 1
            where the device copies by itself.
        pacing: how stores to NVMe are paced; None for the defaults.
        page_lock: page-locks staging memory for the device; None without one.
        clock: monotonic seconds, for statistics; waits use real time.

    Raises:
        CapacityError: the staging budget does not hold one block, and a route needs staging.
        ValueError: the pools do not fit together.
    """

    def __init__(
        self,
        pools: Mapping[Tier, BlockPool],
        staging_bytes: int,
        swap_batch_size: int = 32,
        io_threads: int = DEFAULT_IO_THREADS,
        copy_threads: int = DEFAULT_COPY_THREADS,
        pacing: PacingOptions | None = None,
        page_lock: PageLock | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._routes = build_routes(pools)
        self._clock = clock
        self._batch_blocks = swap_batch_size
        self._staging: StagingBuffer | None = None
        if any(route.staged for route in self._routes.values()):
            stride = next(iter(pools.values())).layout.stride_bytes
            self._staging = StagingBuffer(staging_bytes, swap_batch_size, stride, page_lock)
        self._stats = TransferStats()
        self._changed = threading.Condition()
        self._open: dict[int, PendingJob] = {}
        self._done: deque[Completion] = deque()
        self._next_ticket = 1
        self._closed = False
        self._faults = FaultLog(log)
        context = LaneContext(self._routes, self._staging, self._stats, self._on_error, clock, self._job_ended)

        self._pools = pools

        def lane(name: str, pacer: WritePacer | None = None) -> Lane:
            workers = self._workers(name, copy_threads, io_threads)
            on_file = name in _FILE_LANES
            return Lane(f"dflash2-{name}", context, workers, FILE_FLIGHTS if on_file else 1, on_file, pacer)

        self._lanes = {name: lane(name) for name in (*_COPY_LANES, "load")}
        self._pacer = WritePacer(pacing or PacingOptions(), self._lanes["load"].serves_demand, clock)
        self._lanes["store"] = lane("store", self._pacer)

    def submit(self, job: CopyJob) -> int:
        """See ``TransferEngine.submit``.

        Raises:
            ValueError: the job names a tier that is not there, or slots that cannot be.
            RuntimeError: the engine is closed.
        """
        validate(job, self._routes)
        pending = PendingJob(0, job, self._clock(), self._batch_of(job))
        with self._changed:
            if self._closed:
                raise RuntimeError("the transfer engine is closed")
            pending.ticket = self._next_ticket
            self._next_ticket += 1
            self._open[pending.ticket] = pending
        self._stats.submitted((job.src, job.dst), pending.num_blocks)
        if pending.num_blocks:
            self._lane_of(job).queue.put(pending)
        else:
            self._job_ended(pending)
        return pending.ticket

    def poll(self) -> list[Completion]:
        """See ``TransferEngine.poll``."""
        with self._changed:
            ended = list(self._done)
            self._done.clear()
            return ended

    def wait(self, tickets: list[int], timeout_s: float) -> bool:
        """See ``TransferEngine.wait``."""
        with self._changed:
            return self._changed.wait_for(lambda: not any(t in self._open for t in tickets), timeout_s)

    def cancel(self, ticket: int) -> bool:
        """See ``TransferEngine.cancel``."""
        with self._changed:
            pending = self._open.get(ticket)
        if pending is None:
            return False
        lane = self._lane_of(pending.job)
        removed = lane.queue.remove_unstarted(ticket)
        for found in removed:
            lane.fail(Batch(found, 0, found.num_blocks), "cancelled")
        return bool(removed)

    def close(self, timeout_s: float) -> None:
        """See ``TransferEngine.close``. Memory and files of the pools may be given back only afterwards."""
        with self._changed:
            if self._closed:
                return
            self._closed = True
        deadline = time.monotonic() + timeout_s
        for lane in self._lanes.values():
            lane.close()
            for pending in lane.queue.remove_unstarted():
                lane.fail(Batch(pending, 0, pending.num_blocks), "cancelled")
        self.wait(list(self._open), timeout_s)
        for lane in self._lanes.values():
            for batch in lane.queue.remove_rest():
                lane.fail(batch, "cancelled")
        hanging = [name for name, lane in self._lanes.items() if not lane.join(max(0.1, deadline - time.monotonic()))]
        if hanging:
            log.error("transfer threads still hang in the device at close: %s", ", ".join(hanging))
        elif self._staging is not None:
            self._staging.close()

    @property
    def is_pressed(self) -> bool:
        """See ``TransferEngine.is_pressed``."""
        return self._pacer.is_pressed or self._pacer.is_spent

    def stats(self) -> TransferSnapshot:
        """Counters now."""
        staging = self._staging
        if staging is None:
            return self._stats.snapshot(0, 0, 0)
        return self._stats.snapshot(staging.nbytes, staging.in_use_bytes, staging.peak_bytes)

    def check_integrity(self) -> None:
        """See ``TransferEngine.check_integrity``. Exact when idle; while jobs run only what must always hold."""
        with self._changed:
            jobs = [pending.job for pending in self._open.values()] + [done.job for done in self._done]
            idle = not self._open
        check_destinations(jobs)
        if not idle:
            return
        if self._stats.queued_blocks():
            raise IntegrityError(f"{self._stats.queued_blocks()} blocks are counted as queued, but no job is open")
        if self._staging is not None and not self._closed:
            self._staging.check_integrity(0)

    def _batch_of(self, job: CopyJob) -> int:
        if job.layers is not None:
            return max(1, len(job.src_slots))  # all blocks of a layer come before the next layer
        route = self._routes[(job.src, job.dst)]
        if self._staging is not None and route.staged:
            return min(self._batch_blocks, self._staging.chunk_blocks)
        return burst_blocks(self._batch_blocks, route.src.layout.block_bytes)

    def _lane_of(self, job: CopyJob) -> Lane:
        if Tier.NVME in (job.src, job.dst):
            return self._lanes["load" if job.src is Tier.NVME else "store"]
        return self._lanes["swap-in" if job.dst is Tier.HBM else "swap-out"]

    def _workers(self, lane: str, copy_threads: int, io_threads: int) -> ThreadWorkers | InlineWorkers:
        name = f"dflash2-{lane}"
        block_bytes = next(iter(self._routes.values())).src.layout.block_bytes
        if spreads_itself(self._pools.get(Tier.NVME if lane in _FILE_LANES else Tier.HBM)):
            return InlineWorkers(self._on_error)
        if lane == "load":
            return ThreadWorkers(io_threads, name, self._on_error)
        if lane == "store":
            share = -(-_MIN_STORE_SHARE_BYTES // block_bytes)
            return ThreadWorkers(io_threads, name, self._on_error, min_share_blocks=share)
        if copy_threads < 2:
            return InlineWorkers(self._on_error)
        return ThreadWorkers(
            copy_threads - 1,
            name,
            self._on_error,
            caller_works=True,
            min_share_blocks=-(-_MIN_COPY_SHARE_BYTES // block_bytes),
        )

    def _on_error(self, error: Exception) -> None:
        self._faults.report("unexpected error in a transfer", repr(error))

    def _job_ended(self, pending: PendingJob) -> None:
        job, wall_s = pending.job, self._clock() - pending.submitted_at
        self._stats.job_done((job.src, job.dst), wall_s)
        if job.layers is not None:
            job.layers.ended(bool(pending.ok.all()))
        with self._changed:
            del self._open[pending.ticket]
            self._done.append(Completion(pending.ticket, job, pending.ok, pending.bad_source, wall_s))
            self._changed.notify_all()


def build_routes(pools: Mapping[Tier, BlockPool]) -> dict[tuple[Tier, Tier], Route]:
    """Every ordered pair of different tiers.

    Raises:
        ValueError: fewer than two pools, a pool under the wrong tier, or different layouts.
    """
    if len(pools) < 2:
        raise ValueError("a transfer needs at least two pools")
    for tier, pool in pools.items():
        if pool.tier is not tier:
            raise ValueError(f"the pool given for {tier.label} is of tier {pool.tier.label}")
    if len({pool.layout for pool in pools.values()}) != 1:
        raise ValueError("all pools must have one layout")
    return {(a, b): Route(pools[a], pools[b]) for a in pools for b in pools if a is not b}


def validate(job: CopyJob, routes: Mapping[tuple[Tier, Tier], Route]) -> None:
    """Raise ValueError if the job is not one that could ever run."""
    route = routes.get((job.src, job.dst))
    if route is None:
        raise ValueError(f"no route from {job.src.label} to {job.dst.label}")
    count = len(job.src_slots)
    if job.dst_slots.shape != (count,) or (job.keys is not None and len(job.keys) != count):
        raise ValueError(f"a job of {count} sources has {len(job.dst_slots)} destinations or other keys")
    for slots, pool in ((job.src_slots, route.src), (job.dst_slots, route.dst)):
        if count and (int(slots.min()) < 0 or int(slots.max()) >= pool.num_slots):
            raise ValueError(f"a slot is outside the {pool.tier.label} pool of {pool.num_slots}")


def check_destinations(jobs: list[CopyJob]) -> None:
    """Raise IntegrityError if a destination slot is named twice among jobs not yet polled."""
    by_tier: dict[Tier, list[np.ndarray]] = {}
    for job in jobs:
        by_tier.setdefault(job.dst, []).append(job.dst_slots)
    for tier, parts in by_tier.items():
        slots = np.concatenate(parts)
        if len(np.unique(slots)) != len(slots):
            raise IntegrityError(f"a {tier.label} slot is the destination of two copies at once")
