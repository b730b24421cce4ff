"""Making room on a tier: what is given up, what is pushed down, and in which order."""

from __future__ import annotations

import numpy as np

from dflash2.cache.mover import Mover
from dflash2.monitoring.counters import CacheCounters
from dflash2.policy.base import PlacementPolicy
from dflash2.table.page_table import TIER_BIT, BlockState, PageTable
from dflash2.table.prefix_index import PrefixIndex
from dflash2.types import TIERS_BELOW_HBM, BoolArray, IntArray, Tier, Urgency

SURPLUS = 4
"""Candidates looked at per block to forget: some still have followers at first."""


class Room:
    """Frees slots. Nothing here waits: what needs a copy first is begun and counts when it has arrived.

    The order everywhere: copies that exist elsewhere too (free), then demotion of the least valuable (a copy), then
    cached blocks that nobody holds (lost, recomputed if ever needed). Blocks of open requests are never lost.
    """

    def __init__(
        self,
        table: PageTable,
        index: PrefixIndex,
        policy: PlacementPolicy,
        mover: Mover,
        counters: CacheCounters,
    ) -> None:
        self._table = table
        self._index = index
        self._policy = policy
        self._mover = mover
        self._counters = counters

    def make(self, tier: Tier, count: int, now: float) -> bool:
        """Whether ``count`` slots of ``tier`` are free now; if not, begin what will free them."""
        table = self._table
        if table.num_free(tier) >= count:
            return True
        self._free_duplicates(tier, count - table.num_free(tier), now)
        short = count - table.num_free(tier) - self._mover.leaving(tier)
        if short > 0 and any(self._mover.accepts(below, now) for below in TIERS_BELOW_HBM if below > tier):
            idle = self.idle(tier)
            alone = idle[table.present[idle] & table.lasting == TIER_BIT[tier]]
            self.demote(self._policy.order(table, alone, short, now), tier, now)
        short = count - table.num_free(tier) - self._mover.leaving(tier)
        if short > 0 and not any(self._mover.leaving(below) for below in TIERS_BELOW_HBM if below > tier):
            self._forget(tier, short, now)  # nothing on its way makes room to push more down: this is all there is
        return table.num_free(tier) >= count

    def make_rows(self, count: int, now: float) -> bool:
        """Whether ``count`` rows of the page table are free, after forgetting cached blocks if need be.

        There is a row for every slot, but a lost block keeps its row, without a slot, until its holder notices.
        """
        if count <= self._table.num_free_rows:
            return True
        for tier in reversed(Tier):
            short = count - self._table.num_free_rows
            if short > 0:
                self._forget(tier, short, now)
        return self._table.num_free_rows >= count

    def idle(self, tier: Tier) -> IntArray:
        """Blocks whose slot on ``tier`` may be given up: no copy in flight and, in HBM, no pin."""
        table = self._table
        ids = table.on_tier(tier)
        free = table.busy[ids] == 0
        if tier is Tier.HBM:
            free &= table.pin_count[ids] == 0
        idle: IntArray = ids[free]
        return idle

    def demote(
        self,
        ids: IntArray,
        src: Tier,
        now: float,
        urgency: Urgency = Urgency.DEMOTION,
        *,
        keep_source: bool = False,
    ) -> IntArray:
        """Begin to push ``ids`` down from ``src``, as far as the tiers below have or can make room at once.

        Args:
            ids: blocks.
            src: the tier they are on.
            now: seconds.
            urgency: of the copies.
            keep_source: the copy on ``src`` stays, and can be given up at once when room is needed.

        Returns:
            The ids begun.
        """
        begun: list[IntArray] = []
        for dst in TIERS_BELOW_HBM:
            if dst is Tier.NVME and self._mover.spares_nvme:
                ids = ids[self._table.ref_count[ids] > 0]
            if dst <= src or not len(ids) or not self._mover.accepts(dst, now):
                continue
            ids = self._without_worthless(ids, src, dst, now)
            self.make(dst, len(ids), now)
            ids = ids[self._table.has(ids, src)]  # making room may have forgotten some of them
            moved = self._mover.copy(ids, src, dst, urgency, evict_source=not keep_source)
            begun.append(moved)
            ids = ids[len(moved) :]
            if self._mover.leaving(dst):
                break  # room is coming one tier down; going around it would put warm blocks on the slow tier
        return np.concatenate(begun) if begun else ids[:0]

    def _without_worthless(self, ids: IntArray, src: Tier, dst: Tier, now: float) -> IntArray:
        """Forget those of ``ids`` that are not worth a copy on ``dst``: nobody holds them, no others follow them.

        Returns:
            The others.
        """
        table = self._table
        cached = (table.ref_count[ids] == 0) & (table.state[ids] == BlockState.PUBLISHED)
        cached &= (table.present[ids] & table.lasting == TIER_BIT[src]) & (table.busy[ids] == 0)
        leaving = ids[cached]
        self._give_up(leaving[self._policy.on_leave(table, leaving, dst, now)], src)
        return ids[table.has(ids, src)]

    def free_clean(self, ids: IntArray) -> IntArray:
        """Give up the HBM slots of those ``ids`` that have a copy below.

        Returns:
            The others.
        """
        below = np.uint8(TIER_BIT[Tier.DRAM] | TIER_BIT[Tier.NVME])
        clean = (self._table.present[ids] & below) != 0
        self._table.drop(ids[clean], Tier.HBM)
        self._counters.freed_clean_blocks += int(np.count_nonzero(clean))
        dirty: IntArray = ids[~clean]
        return dirty

    def free_copies_of_pinned(self, tier: Tier, count: int) -> int:
        """Give up copies below HBM of blocks that are pinned there: nobody reads them before the pin ends.

        Args:
            tier: DRAM or NVMe.
            count: how many at most.

        Returns:
            Slots freed.
        """
        table = self._table
        idle = self.idle(tier)
        spare = idle[(table.pin_count[idle] > 0) & table.has(idle, Tier.HBM)][:count]
        table.drop(spare, tier)
        return len(spare)

    def free_dram_copies(self, count: int, expected: IntArray, now: float) -> int:
        """Give up copies in DRAM of blocks that are on NVMe as well, the least valuable first: they are not lost.

        Args:
            count: how many at most.
            expected: blocks that somebody waits for; their copies stay.
            now: seconds.

        Returns:
            Slots freed.
        """
        table = self._table
        idle = self.idle(Tier.DRAM)
        idle = idle[table.has(idle, Tier.NVME)]
        victims = self._policy.order(table, idle[~np.isin(idle, expected)], count, now)
        table.drop(victims, Tier.DRAM)
        return len(victims)

    def _free_duplicates(self, tier: Tier, count: int, now: float) -> None:
        """Give up copies that are not the only one, the least valuable first.

        One on NVMe has cost a write and would cost another: of blocks that nobody holds only those go that would go if
        it were the only one.
        """
        table = self._table
        if not any(table.num_used(other) for other in Tier if other is not tier):
            return
        if tier is not Tier.HBM:
            count -= self.free_copies_of_pinned(tier, count)
        idle = self.idle(tier)
        if tier is Tier.NVME:
            held = table.ref_count[idle] > 0
            idle = np.concatenate([idle[held], self._policy.order(table, idle[~held], count, now)])
        elsewhere = idle[(table.present[idle] & table.lasting & ~TIER_BIT[tier]) != 0]
        victims = self._policy.order(table, elsewhere, count, now)
        if tier is Tier.HBM:
            self.free_clean(victims)
        else:
            table.drop(victims, tier)

    def _forget(self, tier: Tier, count: int, now: float) -> None:
        """Give up cached blocks that nobody holds, followers before their parents."""
        table = self._table
        target = table.num_free(tier) + count
        idle = self.idle(tier)
        unheld = idle[(table.ref_count[idle] == 0) & (table.state[idle] == BlockState.PUBLISHED)]
        victims = self._policy.order(table, unheld, SURPLUS * count, now)
        while len(victims) and table.num_free(tier) < target:
            self._forget_ends(victims, target - table.num_free(tier), tier)
            unheld = unheld[(table.state[unheld] == BlockState.PUBLISHED) & table.has(unheld, tier)]
            ends = unheld[table.num_children[unheld] == 0]
            victims = self._policy.order(table, ends, target - table.num_free(tier), now)
        # What is left has followers elsewhere, that a running request holds perhaps. Without this last resort such
        # blocks could fill a tier and nothing would ever free them.
        for block_id in self._policy.order(table, unheld, target - table.num_free(tier), now).tolist():
            if table.num_free(tier) < target and table.state[block_id] == BlockState.PUBLISHED:
                self._drop_cached(block_id, tier)

    def _forget_ends(self, victims: IntArray, count: int, tier: Tier) -> None:
        """Give up the slots of the first ``count`` victims that have no followers but among those given up."""
        elsewhere = self._is_elsewhere(victims, tier)
        alone = ~elsewhere
        alone[alone] = self._index.ends_among(victims[alone])
        self._give_up(victims[alone | elsewhere][:count], tier)

    def _give_up(self, ids: IntArray, tier: Tier) -> None:
        """Forget those of ``ids`` that have no followers but among them.

        Of those that are elsewhere as well, on an engine's own device perhaps, only the slot on ``tier`` is given up.
        """
        elsewhere = self._is_elsewhere(ids, tier)
        self._table.drop(ids[elsewhere], tier)
        going = ids[~elsewhere]
        going = going[self._index.ends_among(going)]
        self._index.unpublish_ends(going)
        self.release(going)
        self._counters.dropped_blocks += len(going)

    def _is_elsewhere(self, ids: IntArray, tier: Tier) -> BoolArray:
        found: BoolArray = (self._table.present[ids] & ~TIER_BIT[tier]) != 0
        return found

    def _drop_cached(self, block_id: int, tier: Tier) -> None:
        """Forget a block and whatever follows it, and free those of them that nobody holds.

        Of a block that is elsewhere as well only the slot on ``tier`` is given up.
        """
        if self._table.present[block_id] & ~TIER_BIT[tier]:
            self._table.drop(np.array([block_id], np.int32), tier)
            return
        taken = np.array(self._index.unpublish(block_id), np.int32)
        self.release(taken)
        self._counters.dropped_blocks += int(np.count_nonzero(self._table.state[taken] == BlockState.FREE))

    def release(self, ids: IntArray) -> None:
        """Free those of ``ids`` that nobody holds, that are not published and not being copied."""
        table = self._table
        unheld = (table.ref_count[ids] == 0) & (table.busy[ids] == 0)
        unheld &= (table.state[ids] == BlockState.OPEN) | (table.state[ids] == BlockState.SEALED)
        gone = ids[unheld]
        if not len(gone):
            return
        for tier in Tier:
            table.drop(gone[table.has(gone, tier)], tier)
        table.free(gone)
