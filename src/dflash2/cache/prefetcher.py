"""Brings blocks nearer ahead of need: conservative, counted, never at a hotter block's cost (R-3.4)."""

from __future__ import annotations

import numpy as np

from dflash2.cache.mover import Mover
from dflash2.cache.room import Room
from dflash2.monitoring.counters import CacheCounters
from dflash2.policy.prefetch import PrefetchWindow
from dflash2.table.page_table import TIER_BIT, PageTable
from dflash2.types import IntArray, Tier, Urgency

DRAM_BUDGET = 0.25
"""Share of DRAM's slots that blocks prefetched and not used yet may take; the window is always allowed."""


class Prefetcher:
    """Takes free slots, and in DRAM those of copies that nobody waits for: no prefetch costs a block its last copy.

    Args:
        table: page table.
        mover: begins the copies.
        counters: outcomes are counted there.
        room: gives up DRAM copies of blocks that are pinned in HBM, or that are on NVMe as well.
        window: ``kv_block.prefetch_window``, blocks in flight at a time.
    """

    def __init__(self, table: PageTable, mover: Mover, room: Room, counters: CacheCounters, window: int) -> None:
        self._table = table
        self._mover = mover
        self._room = room
        self._counters = counters
        self.window = PrefetchWindow(window)
        self._outstanding: dict[int, Tier] = {}

    @property
    def num_outstanding(self) -> int:
        """Prefetched blocks, in flight or arrived, that nobody has used yet."""
        return len(self._outstanding)

    def without_outstanding(self, ids: IntArray) -> IntArray:
        """Those of ``ids`` that do not wait for their first use after a prefetch."""
        outstanding = np.fromiter(self._outstanding, np.int32, len(self._outstanding))
        others: IntArray = ids[~np.isin(ids, outstanding)]
        return others

    def run(self, upcoming: IntArray, spare_hbm_slots: int, now: float) -> None:
        """Prefetch for sequences that run next.

        Args:
            upcoming: int32, blocks in the order in which they will be needed.
            spare_hbm_slots: HBM slots that may be used for this.
            now: seconds.
        """
        if self._outstanding:
            self._drop_wasted(upcoming)
        window = self.window.update(has_room=spare_hbm_slots > 0)
        budget = max(window, int(DRAM_BUDGET * self._table.capacity(Tier.DRAM)))
        allowed = min(window - self._num_in_flight(), budget - len(self._outstanding))
        if allowed <= 0 or not len(upcoming):
            return
        table = self._table
        away = upcoming[(table.present[upcoming] != 0) & ~table.has(upcoming, Tier.HBM)]
        away = away[table.arriving[away] == 0]
        to_hbm = away[: min(allowed, spare_hbm_slots)]
        for src in (Tier.DRAM, Tier.NVME):
            fastest = table.has(to_hbm, src)
            self._begin(to_hbm[fastest], src, Tier.HBM)
            to_hbm = to_hbm[~fastest]
        on_nvme_only = away[table.present[away] == TIER_BIT[Tier.NVME]]
        on_nvme_only = on_nvme_only[table.arriving[on_nvme_only] == 0][: max(0, allowed - spare_hbm_slots)]
        short = len(on_nvme_only) - table.num_free(Tier.DRAM)
        if short > 0:
            short -= self._room.free_copies_of_pinned(Tier.DRAM, short)
        if short > 0:
            self._room.free_dram_copies(short, upcoming, now)
        self._begin(on_nvme_only, Tier.NVME, Tier.DRAM)

    def _num_in_flight(self) -> int:
        return sum(
            bool(self._table.arriving[block_id] & TIER_BIT[tier]) for block_id, tier in self._outstanding.items()
        )

    def note_needed(self, ids: IntArray) -> None:
        """These blocks are needed now: settle the outcome of those that were prefetched."""
        if not self._outstanding:
            return
        for block_id in self._outstanding.keys() & set(ids.tolist()):
            tier = self._outstanding.pop(block_id)
            if self._table.present[block_id] & TIER_BIT[tier]:
                self._counters.prefetch_used_blocks += 1
                self.window.note(used=1)
            else:
                self._counters.prefetch_late_blocks += 1

    def _begin(self, ids: IntArray, src: Tier, dst: Tier) -> None:
        begun = self._mover.copy(ids, src, dst, Urgency.SPECULATIVE)
        self._counters.prefetch_issued_blocks += len(begun)
        self._outstanding.update(dict.fromkeys(begun.tolist(), dst))

    def _drop_wasted(self, upcoming: IntArray) -> None:
        """Prefetched copies that were given up before anybody used them, or that nobody waits for any more.

        Without the second kind the blocks of cancelled requests would use up the window for good.
        """
        outstanding = list(self._outstanding.items())
        ids = np.array([block_id for block_id, _ in outstanding], np.int32)
        expected = np.isin(ids, upcoming, kind="table").tolist()  # few among many: sorting the many would take longer
        for (block_id, tier), is_expected in zip(outstanding, expected, strict=True):
            there = (self._table.present[block_id] | self._table.arriving[block_id]) & TIER_BIT[tier]
            if not there or not is_expected:
                del self._outstanding[block_id]
                self._counters.prefetch_wasted_blocks += 1
                self.window.note(wasted=1)
