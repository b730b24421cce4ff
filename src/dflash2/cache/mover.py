"""Copies between tiers, seen from the page table: begun here, committed here, visible only after that."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from dflash2.monitoring.counters import CacheCounters
from dflash2.pools.faultlog import FaultLog
from dflash2.table.page_table import BlockState, PageTable
from dflash2.table.prefix_index import PrefixIndex
from dflash2.transfer.base import Completion, CopyJob, LayerWatcher, TransferEngine, burst_blocks
from dflash2.types import KEY_BYTES, TIERS_BELOW_HBM, IntArray, Tier, Urgency

logger = logging.getLogger(__name__)

WRITE_RETRY_S = 5.0
"""A tier that failed a write is left alone for so long before the next attempt."""


@dataclass(frozen=True, slots=True)
class _Move:
    ids: IntArray
    generations: npt.NDArray[np.uint32]
    job: CopyJob
    evict_source: bool
    delivered: bool = False
    """To slots that the table does not know."""


class Mover:
    """Begins copies and commits those that have ended.

    Args:
        table: page table; marked before a copy begins and after it ends.
        index: gives the keys for NVMe headers and forgets lost blocks.
        transfer: moves the bytes.
        counters: what is counted.
        block_bytes: payload of one block, for byte counts.
        batch_blocks: ``swap_batch_size``; bounds a job as ``burst_blocks`` says.
        reap: called with ids whose copy has ended, to free those that nobody holds any more.
    """

    def __init__(
        self,
        table: PageTable,
        index: PrefixIndex,
        transfer: TransferEngine,
        counters: CacheCounters,
        block_bytes: int,
        batch_blocks: int,
        reap: Callable[[IntArray], None],
    ) -> None:
        self._table = table
        self._index = index
        self._transfer = transfer
        self._counters = counters
        self._block_bytes = block_bytes
        self.batch_blocks = batch_blocks
        self._reap = reap
        self._moves: dict[int, _Move] = {}
        self._leaving = dict.fromkeys(Tier, 0)
        self._retry_at = dict.fromkeys(Tier, 0.0)
        self._faults = FaultLog(logger)

    @property
    def num_in_flight(self) -> int:
        """Jobs that have not been committed."""
        return len(self._moves)

    def leaving(self, tier: Tier) -> int:
        """Blocks in flight that will free a slot of ``tier`` when they have arrived elsewhere."""
        return self._leaving[tier]

    @property
    def spares_nvme(self) -> bool:
        """NVMe is slow now or has had its writes for the day: only what somebody holds should go there."""
        return self._transfer.is_pressed

    def arriving_slots(self, tier: Tier) -> dict[int, IntArray]:
        """For each copy in flight to ``tier``, by its ticket, the slots that it writes."""
        return {ticket: move.job.dst_slots for ticket, move in self._moves.items() if move.job.dst is tier}

    def forget_keys(self) -> None:
        """Copies to NVMe leave no keys there, and those from it ask for none, as far as they have not begun."""
        for move in self._moves.values():
            if move.job.keys is not None:
                move.job.keys[:] = 0

    def accepts(self, tier: Tier, now: float) -> bool:
        """The tier exists and is not resting after a failed write."""
        return self._table.capacity(tier) > 0 and now >= self._retry_at[tier]

    def copy(
        self,
        ids: IntArray,
        src: Tier,
        dst: Tier,
        urgency: Urgency,
        *,
        evict_source: bool = False,
        ready: Callable[[], None] | None = None,
    ) -> npt.NDArray[np.int32]:
        """Begin to copy as many of ``ids``, in order, as ``dst`` has free slots for.

        Args:
            ids: blocks with a complete copy on ``src`` and none, complete or arriving, on ``dst``.
            evict_source: give up the source slot when the copy has arrived, unless it is needed by then.
            ready: see ``CopyJob``.

        Returns:
            The ids begun.
        """
        table = self._table
        ids = ids[: table.num_free(dst)]
        size = burst_blocks(self.batch_blocks, self._block_bytes)
        for start in range(0, len(ids), size):
            batch = ids[start : start + size]
            slots = table.tiers[dst].try_take(len(batch))
            assert slots is not None
            table.place(batch, dst, slots)
            table.mark_busy(batch)
            headers = self._headers(batch, src, dst)
            job = CopyJob(src, dst, table.slots_of(batch, src).copy(), slots, urgency, headers, ready)
            move = _Move(batch, table.generation[batch].copy(), job, evict_source)
            self._moves[self._transfer.submit(job)] = move
            self._leaving[src] += len(batch) if evict_source else 0
        return ids

    def deliver(
        self,
        ids: IntArray,
        src: Tier,
        dst_slots: IntArray,
        watcher: LayerWatcher | None,
        ready: Callable[[], None] | None = None,
    ) -> None:
        """Copy blocks to HBM slots of an engine of its own, of which the table knows nothing, as one job.

        Args:
            ids: blocks with a complete copy on ``src``; they keep it until the job has ended.
            src: DRAM, for a load that cannot fail.
            dst_slots: int32 ``[n]``, distinct; the engine leaves them alone until the job has ended.
            watcher: told layer by layer.
            ready: see ``CopyJob``.
        """
        table = self._table
        table.mark_busy(ids)
        slots = table.slots_of(ids, src).copy()
        job = CopyJob(src, Tier.HBM, slots, dst_slots, Urgency.DEMAND, None, ready, watcher)
        move = _Move(ids, table.generation[ids].copy(), job, evict_source=False, delivered=True)
        self._moves[self._transfer.submit(job)] = move

    def poll(self, now: float) -> None:
        """Commit every copy that has ended."""
        for completion in self._transfer.poll():
            self._commit(completion, now)

    def wait(self, ids: IntArray, timeout_s: float, now: float) -> bool:
        """Wait until no copy of these blocks is in flight, then commit.

        Returns:
            False if the time was up first.
        """
        wanted = set(ids.tolist())
        tickets = [ticket for ticket, move in self._moves.items() if not wanted.isdisjoint(move.ids.tolist())]
        ended = self._transfer.wait(tickets, timeout_s)
        self.poll(now)
        return ended

    def wait_any(self, timeout_s: float, now: float) -> None:
        """Wait for the oldest copy in flight, then commit what has ended."""
        if self._moves:
            self._transfer.wait([next(iter(self._moves))], timeout_s)
        self.poll(now)

    def _headers(self, ids: IntArray, src: Tier, dst: Tier) -> npt.NDArray[np.uint8] | None:
        """Keys for the NVMe headers, to be written or to be compared with what is read.

        A block without a published key gets zeros and is never adopted.
        """
        if Tier.NVME not in (src, dst):
            return None
        keys = (self._index.key_of(int(block_id)) or bytes(KEY_BYTES) for block_id in ids)
        return np.array(np.frombuffer(b"".join(keys), np.uint8)).reshape(len(ids), KEY_BYTES)

    def _commit(self, completion: Completion, now: float) -> None:
        table = self._table
        move = self._moves.pop(completion.ticket)
        ids, src, dst = move.ids, move.job.src, move.job.dst
        self._leaving[src] -= len(ids) if move.evict_source else 0
        table.unmark_busy(ids)
        arrived = ids[completion.ok]
        failed = ids[~completion.ok]
        if not move.delivered:
            table.settle(arrived, dst)
            table.drop_failed(failed, dst)
        self._count(len(arrived), src, dst)
        if len(failed):
            self._note_failure(failed, completion, now)
        written_since = table.generation[ids] != move.generations
        self._drop_stale(ids[written_since])
        if move.evict_source:
            self._evict(arrived[~written_since[completion.ok]], src)
        self._reap(ids)

    def _evict(self, ids: IntArray, src: Tier) -> None:
        """Give up source slots, except where the block is in use or another copy reads from it."""
        table = self._table
        free = (table.busy[ids] == 0) & table.has(ids, src)
        if src is Tier.HBM:
            free &= table.pin_count[ids] == 0
        table.drop(ids[free], src)

    def _drop_stale(self, ids: IntArray) -> None:
        """Blocks written while they were copied: only the copy in HBM is true."""
        idle = ids[self._table.busy[ids] == 0]
        for tier in TIERS_BELOW_HBM:
            self._table.drop(idle[self._table.has(idle, tier)], tier)

    def _note_failure(self, failed: IntArray, completion: Completion, now: float) -> None:
        table = self._table
        job = completion.job
        self._counters.failed_copies += len(failed)
        bad = failed[completion.bad_source[~completion.ok]]
        if len(bad) < len(failed) and job.dst is Tier.NVME:
            self._retry_at[Tier.NVME] = now + WRITE_RETRY_S
        # A slot that another copy still reads is not given up; that copy will find it bad as well.
        bad = bad[table.has(bad, job.src) & (table.busy[bad] == 0)]
        table.drop(bad, job.src, retire=job.src is Tier.NVME)
        lost = bad[table.present[bad] == 0]
        self._counters.lost_blocks += len(lost)
        for block_id in lost:
            if table.state[block_id] == BlockState.PUBLISHED:
                self._reap(np.array(self._index.unpublish(int(block_id)), np.int32))
        self._faults.report(
            f"copy from {job.src.label} to {job.dst.label} failed",
            f"{len(failed)} of {len(job.src_slots)} blocks; {len(lost)} have no copy left and will be recomputed",
        )

    def _count(self, num: int, src: Tier, dst: Tier) -> None:
        counters = self._counters
        if dst is Tier.HBM:
            counters.swap_in_blocks += num
            counters.swap_in_bytes += num * self._block_bytes
        if src is Tier.HBM:
            counters.swap_out_blocks += num
            counters.swap_out_bytes += num * self._block_bytes
        if dst is Tier.NVME:
            counters.demoted_to_nvme_blocks += num
        if src is Tier.NVME:
            counters.loaded_from_nvme_blocks += num
