"""What the cache and the NVMe pool have to tell each other: a flush reaches the disk, and bad slots leave the table."""

from __future__ import annotations

import numpy as np

from dflash2.cache.manager import CacheManager
from dflash2.cache.reservation import ReservationLedger, reservable_blocks
from dflash2.pools.nvme import NvmePool
from dflash2.table.slots import SlotAllocator
from dflash2.types import IntArray, Tier


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
