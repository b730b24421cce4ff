"""What the cache and the NVMe pool have to tell each other: a flush reaches the disk, and bad slots leave the table."""

from __future__ import annotations

import logging
import time

import numpy as np

from dflash2.cache.manager import CacheManager
from dflash2.cache.reservation import ReservationLedger, reservable_blocks
from dflash2.pools.nvme import NvmePool
from dflash2.table.page_table import TIER_BIT, BlockState
from dflash2.table.slots import SlotAllocator
from dflash2.types import IntArray, Tier, Urgency

logger = logging.getLogger(__name__)

_DRAIN_DEPTH = 2
"""Jobs in flight while the end is being prepared: enough to keep the device busy, few enough to stop in time."""


class DiskUpkeep:
    """Runs after completions have been committed; costs nothing while there is nothing to do.

    Args:
        cache: whose blocks are on the disk.
        pool: the NVMe tier; None without one.
        ledger: promises less when slots are lost.
    """

    def __init__(self, cache: CacheManager, pool: NvmePool | None, ledger: ReservationLedger) -> None:
        self._cache = cache
        self._pool = pool
        self._ledger = ledger
        self._num_retired = self._slots.num_retired
        self._unflushed: dict[int, IntArray] = {}
        """Slots that were being written to at the last flush, by the ticket of the copy."""

    def run(self) -> None:
        """Finish a flush whose copies have ended; withdraw slots that the pool has given up."""
        if self._unflushed:
            self._flush_arrived()
        if self._pool is not None and self._pool.num_quarantined > self._slots.num_retired:
            self._slots.withdraw(self._pool.quarantined_slots)
        if self._slots.num_retired != self._num_retired:
            self._num_retired = self._slots.num_retired
            self._ledger.shrink(reservable_blocks(self._cache.table, self._cache.mover.batch_blocks))

    def flush(self) -> None:
        """Forget everything cached on all tiers, and make it unreadable on the disk before returning.

        Blocks of open requests stay readable to them, but no later run finds them. What is on its way to the disk is
        made unreadable when it has arrived.
        """
        self._cache.forget_all()
        if self._pool is None:
            return
        self._cache.mover.forget_keys()
        self._unflushed |= self._cache.mover.arriving_slots(Tier.NVME)
        self._pool.discard(self._slots.free_slots())
        table = self._cache.table
        self._pool.disown(table.slots_of(table.on_tier(Tier.NVME), Tier.NVME))

    def drain(self, timeout_s: float, now: float) -> None:
        """Before the end: copy what would be lost to free slots on NVMe, the most valuable first; log what is dropped.

        Args:
            timeout_s: copies that have not begun by then are left undone.
            now: the clock's time, for the order.
        """
        if self._pool is None:
            return
        deadline = time.monotonic() + timeout_s
        mover, table = self._cache.mover, self._cache.table
        while mover.num_in_flight and time.monotonic() < deadline:
            mover.wait_any(deadline - time.monotonic(), now)
        lost = self._lost_at_the_end()
        wanted = lost[self._cache.policy.worth_storing(table, lost, Tier.NVME, now)]
        wanted = self._cache.policy.order(table, wanted, len(wanted), now)[::-1]
        wanted = wanted[: 0 if mover.spares_nvme else table.num_free(Tier.NVME)]
        for start in range(0, len(wanted), mover.batch_blocks):
            if time.monotonic() >= deadline:
                break
            batch = wanted[start : start + mover.batch_blocks]
            in_dram = table.has(batch, Tier.DRAM)
            mover.copy(batch[in_dram], Tier.DRAM, Tier.NVME, Urgency.DEMOTION)
            mover.copy(batch[~in_dram], Tier.HBM, Tier.NVME, Urgency.DEMOTION)
            while mover.num_in_flight > _DRAIN_DEPTH and time.monotonic() < deadline:
                mover.wait_any(deadline - time.monotonic(), now)
        while mover.num_in_flight and time.monotonic() < deadline:
            mover.wait_any(deadline - time.monotonic(), now)
        num_kept, gb = int(np.count_nonzero(table.has(lost, Tier.NVME))), self._pool.layout.block_bytes / 1e9
        num_dropped = len(lost) - num_kept
        logger.info(
            "%d blocks (%.2f GB) copied to NVMe for the next start, %d (%.2f GB) dropped",
            num_kept,
            num_kept * gb,
            num_dropped,
            num_dropped * gb,
        )

    def _lost_at_the_end(self) -> IntArray:
        """Cached blocks with a copy in memory that this runtime owns, and none on NVMe."""
        table = self._cache.table
        here = (table.state == BlockState.PUBLISHED) & (table.present & table.lasting != 0)
        ids = np.flatnonzero(here & (table.present & TIER_BIT[Tier.NVME] == 0)).astype(np.int32)
        lost: IntArray = ids[table.busy[ids] == 0]
        return lost

    def _flush_arrived(self) -> None:
        in_flight = self._cache.mover.arriving_slots(Tier.NVME)
        ended = [slots for ticket, slots in self._unflushed.items() if ticket not in in_flight]
        self._unflushed = {ticket: slots for ticket, slots in self._unflushed.items() if ticket in in_flight}
        if not ended or self._pool is None:
            return
        slots = np.unique(np.concatenate(ended))
        is_free = np.isin(slots, self._slots.free_slots())
        self._pool.discard(slots[is_free])
        # One of them may hold a block again that was stored after the flush: it loses its key, not its content.
        self._pool.disown(slots[~is_free])

    @property
    def _slots(self) -> SlotAllocator:
        return self._cache.table.tiers[Tier.NVME]
