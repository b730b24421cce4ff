"""Which blocks of the device get a copy below it, and when: ahead of need, so that giving up a page costs nothing."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from dflash2.cache.manager import CacheManager
from dflash2.table.page_table import TIER_BIT, BlockState
from dflash2.types import TIERS_BELOW_HBM, IntArray, Tier, Urgency

Ready = Callable[[], None]
"""See ``transfer.base.CopyJob.ready``."""


CLEAN_SHARE = 0.25
"""Share of DRAM that can be given up at once: what a request wants from NVMe must not wait a step for writes."""


class CopyDown:
    """Begins copies from HBM to DRAM, and from DRAM to NVMe. Nothing here waits.

    What goes on to NVMe is decided where DRAM makes room (``cache.room``), as for any engine: late, and not everything.

    Args:
        cache: the manager whose blocks are copied.
        clock: time of decisions.
        margin_blocks: free device pages below which copying begins.
    """

    def __init__(self, cache: CacheManager, clock: Callable[[], float], margin_blocks: int) -> None:
        self._cache = cache
        self._table = cache.table
        self._clock = clock
        self._margin = margin_blocks
        self._may_be_alone = True
        """Some blocks may be in HBM only; cleared when a search finds none."""
        self._seen_above = self._seen_clean = (-1.0, 0, 0)
        self._copied_at = np.full(len(self._table.last_use), -1.0)
        """Last use of each block when it was copied: one that lost that copy and was not used since gets no other."""

    def note_new(self) -> None:
        """Blocks were computed."""
        self._may_be_alone = True

    def ahead(self, num_free_pages: int, ready: Ready | None) -> None:
        """Once a step: while few device pages are free, copy those blocks to DRAM that are nowhere else.

        What DRAM has no room for yet waits for a later step: new blocks must not go to NVMe past older ones, which are
        likelier to be forgotten.

        Args:
            num_free_pages: device pages that hold nothing.
            ready: for copies that read device pages.
        """
        if num_free_pages < self._margin and self._may_be_alone and self._seen_above != self._marks():
            self._seen_above = self._marks()
            self._copy(self._worth_storing(self._next_alone(self._margin)), Tier.DRAM, ready)

    def begin(self, ids: IntArray, ready: Ready | None) -> None:
        """Begin to copy blocks that are in HBM only, all of them: to DRAM, or to NVMe where DRAM has no room."""
        for tier in TIERS_BELOW_HBM:
            ids = self._copy(ids, tier, ready)

    def clean_dram(self) -> None:
        """Once a step, while nothing else moves: a part of DRAM is free, or on NVMe as well, before it is needed."""
        table, mover, now = self._table, self._cache.mover, self._clock()
        if not self._takes(Tier.NVME) or mover.num_in_flight or self._seen_clean == self._marks():
            return
        self._seen_clean = self._marks()
        idle = self._cache.room.idle(Tier.DRAM)
        alone = idle[~table.has(idle, Tier.NVME)]
        num_clean = table.num_free(Tier.DRAM) + len(idle) - len(alone)
        short = int(CLEAN_SHARE * table.capacity(Tier.DRAM)) - num_clean
        next_to_go = self._cache.policy.order(table, alone, min(short, mover.batch_blocks), now)
        self._cache.room.demote(next_to_go, Tier.DRAM, now, Urgency.SPECULATIVE, keep_source=True)

    def _takes(self, tier: Tier) -> bool:
        """What nobody is waiting for may be stored on this tier now. Room that may not be used is no room."""
        mover = self._cache.mover
        return mover.accepts(tier, self._clock()) and not (tier is Tier.NVME and mover.spares_nvme)

    def _copy(self, ids: IntArray, tier: Tier, ready: Ready | None) -> IntArray:
        """Begin to copy blocks from HBM to one tier.

        Returns:
            Those for which there is no room.
        """
        now, mover = self._clock(), self._cache.mover
        if not len(ids) or not mover.accepts(tier, now):
            return ids
        self._cache.room.make(tier, len(ids), now)
        begun = mover.copy(ids, Tier.HBM, tier, Urgency.DEMOTION, ready=ready)
        self._copied_at[begun] = self._table.last_use[begun]
        return ids[len(begun) :]

    def _worth_storing(self, ids: IntArray) -> IntArray:
        """Those that the policy expects to be read again."""
        table = self._table
        return ids[self._cache.policy.worth_storing(table, ids, Tier.DRAM, self._clock())] if len(ids) else ids

    def _marks(self) -> tuple[float, int, int]:
        """Different once something was computed or a copy has ended; until then a search finds what it found."""
        counters = self._cache.counters
        return self._clock(), counters.swap_out_blocks, counters.demoted_to_nvme_blocks

    def _next_alone(self, count: int) -> IntArray:
        """Up to ``count`` blocks that are in HBM only: those unused for longest, a sequence's head before its tail.

        Where the tiers below have no room for all of them, those whose heat does not earn a place are left out.
        """
        table = self._table
        only_here = (table.present == TIER_BIT[Tier.HBM]) & (table.state == BlockState.PUBLISHED)
        only_here &= self._copied_at != table.last_use
        candidates = np.flatnonzero(only_here & (table.busy == 0)).astype(np.int32)
        self._may_be_alone = bool(np.any(only_here))
        order = np.lexsort((table.position[candidates], table.last_use[candidates]))
        alone: IntArray = candidates[order][:count]
        overflow = len(alone) - sum(table.num_free(tier) for tier in TIERS_BELOW_HBM if self._takes(tier))
        if overflow <= 0:
            return alone
        kept = np.flatnonzero(((table.present & ~TIER_BIT[Tier.HBM]) != 0) & (table.busy == 0)).astype(np.int32)
        rivals = np.concatenate([alone, kept])
        losers = self._cache.policy.order(table, rivals, overflow, self._clock())
        earned: IntArray = alone[~np.isin(alone, losers)]
        return earned
