"""Who is in HBM: pins, promises of room to grow, and the blocks that a step writes to."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from dflash2.cache.mover import Mover
from dflash2.cache.prefetcher import Prefetcher
from dflash2.cache.regret import RegretWatch
from dflash2.cache.room import Room
from dflash2.cache.sequence import Residency, Sequence
from dflash2.errors import IntegrityError
from dflash2.monitoring.counters import CacheCounters
from dflash2.policy.base import PlacementPolicy
from dflash2.table.page_table import TIER_BIT, BlockState, PageTable
from dflash2.types import TIERS_BELOW_HBM, IntArray, Tier, Urgency

BlockCopier = Callable[[IntArray, IntArray], None]
"""Copies HBM slots onto HBM slots, ordered with the steps that read and write them."""


class ResidencyManager:
    """Brings sequences into HBM and keeps them there while they are pinned.

    Distinct pinned blocks plus all promised growth never exceed HBM, so whatever a pinned sequence was promised it can
    have: at worst after a demotion that has been begun.
    """

    def __init__(
        self,
        table: PageTable,
        policy: PlacementPolicy,
        room: Room,
        mover: Mover,
        prefetcher: Prefetcher,
        regret: RegretWatch,
        counters: CacheCounters,
        *,
        block_size: int,
        copy_in_hbm: BlockCopier,
    ) -> None:
        self._table = table
        self._policy = policy
        self._room = room
        self._mover = mover
        self._prefetcher = prefetcher
        self._regret = regret
        self._counters = counters
        self._block_size = block_size
        self._copy_in_hbm = copy_in_hbm
        self.num_promised = 0
        """HBM blocks promised to pinned sequences and not taken yet."""

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self._block_size)

    def fits(self, ids: IntArray, num_new_blocks: int) -> bool:
        """Whether HBM can hold these distinct blocks and so many new ones beside what is pinned and promised."""
        table = self._table
        unpinned = int(np.count_nonzero(table.pin_count[ids] == 0))
        return table.num_pinned + self.num_promised + unpinned + num_new_blocks <= table.capacity(Tier.HBM)

    def try_enter(self, sequence: Sequence, growth_tokens: int, now: float) -> bool:
        """Pin a paused sequence, promise it room for ``growth_tokens`` more, and begin to load what is not in HBM.

        Returns:
            False, and no change, if the pinned blocks and the promises would not fit HBM together.
        """
        table, ids = self._table, sequence.block_ids
        growth = self._growth_blocks(sequence, growth_tokens)
        if not self.fits(ids, growth):
            return False
        self._note_use(ids, now, sequence.request_id)
        table.pin(ids)
        sequence.growth_blocks = growth
        self.num_promised += growth
        sequence.residency = Residency.ENTERING
        sequence.entered_s = now
        self.advance_entering(sequence, now)
        return True

    def try_extend(self, sequence: Sequence, growth_tokens: int) -> bool:
        """Raise a pinned sequence's promise so that ``growth_tokens`` more fit; False and no change if they do not."""
        if sequence.num_tokens + growth_tokens <= sequence.writable_tokens:
            return True  # the rule in a decode step
        more = self._growth_blocks(sequence, growth_tokens) - sequence.growth_blocks
        if more <= 0:
            return True
        if self._table.num_pinned + self.num_promised + more > self._table.capacity(Tier.HBM):
            return False
        sequence.growth_blocks += more
        self.num_promised += more
        return True

    def advance_entering(self, sequence: Sequence, now: float) -> bool:
        """Carry an ENTERING sequence on as far as slots allow.

        Returns:
            True once it is RESIDENT.
        """
        table, ids = self._table, sequence.block_ids
        absent = ids[~table.has(ids, Tier.HBM)]
        if len(absent):
            # A block on its way down can be loaded all the same: nobody waits for a demotion's write.
            on_the_way = (table.arriving[absent] & TIER_BIT[Tier.HBM]) != 0
            waiting = absent[~on_the_way & (table.present[absent] != 0)]
            if len(waiting):
                self._room.make(Tier.HBM, len(waiting), now)
                self.load(waiting, Urgency.DEMAND)
            return False
        self._drop_below_if_open(ids)
        sequence.hbm_slots = table.slots_of(ids, Tier.HBM)
        sequence.residency = Residency.RESIDENT
        return True

    def load(self, ids: IntArray, urgency: Urgency) -> None:
        """Begin to copy blocks to HBM from the fastest tier that has them, as far as free slots go."""
        from_dram = self._table.has(ids, Tier.DRAM)
        self._mover.copy(ids[from_dram], Tier.DRAM, Tier.HBM, urgency)
        self._mover.copy(ids[~from_dram], Tier.NVME, Tier.HBM, urgency)

    def first_lost(self, sequence: Sequence) -> int | None:
        """Index of the first block that no tier can give back any more, or None."""
        lost = np.flatnonzero(self._table.present[sequence.block_ids] == 0)
        return int(lost[0]) if len(lost) else None

    def leave(self, sequence: Sequence, now: float) -> None:
        """Unpin a sequence between two steps: its blocks may be moved. No effect on a paused one."""
        if sequence.residency is Residency.PAUSED:
            return
        self._table.unpin(sequence.block_ids)
        self._table.last_use[sequence.block_ids] = now  # each step until now has read all of them
        self.num_promised -= sequence.growth_blocks
        sequence.growth_blocks = 0
        sequence.writable_tokens = 0
        sequence.residency = Residency.PAUSED

    def try_attach(self, sequence: Sequence, ids: IntArray, now: float) -> bool:
        """Put existing blocks (int32 ``[n]``) behind those of a sequence; a pinned one pins them too.

        Returns:
            False, and no change, if HBM cannot hold them beside what is pinned and promised.
        """
        table = self._table
        if sequence.residency is not Residency.PAUSED:
            freed = min(len(ids), sequence.growth_blocks)
            unpinned = int(np.count_nonzero(table.pin_count[ids] == 0))
            if table.num_pinned + unpinned + self.num_promised - freed > table.capacity(Tier.HBM):
                return False
            sequence.growth_blocks -= freed
            self.num_promised -= freed
            self._note_use(ids, now, sequence.request_id)
            table.pin(ids)
            sequence.writable_tokens = 0
            sequence.residency = Residency.ENTERING
            sequence.entered_s = now
        sequence.block_ids = np.concatenate([sequence.block_ids, ids])
        if sequence.residency is Residency.ENTERING:
            self.advance_entering(sequence, now)
        return True

    def expect(self, sequence: Sequence, at: float) -> None:
        """The queue knows when this paused sequence runs next; where several share blocks, the one told last counts."""
        ids = sequence.block_ids
        self._table.next_use[ids] = at

    def try_grow(self, sequence: Sequence, num_new_tokens: int, now: float) -> bool:
        """Take the blocks that a resident sequence's next ``num_new_tokens`` tokens will be written to.

        Returns:
            False, and no change, if a slot is still on its way; what frees it has been begun.
        """
        if sequence.num_tokens + num_new_tokens <= sequence.writable_tokens:
            return True  # the rule in a decode step
        if sequence.residency is not Residency.RESIDENT:
            raise IntegrityError(f"sequence {sequence.request_id} is not resident")
        shared_tail = self._shared_tail(sequence)
        num_held = len(sequence.block_ids)
        count = self._growth_blocks(sequence, num_new_tokens)
        if count > sequence.growth_blocks and not self.try_extend(sequence, num_new_tokens):
            return False
        if count:
            new = self._try_new_blocks(count, now, sequence.request_id)
            if new is None:
                return False
            if shared_tail:
                self._replace_tail(sequence, new[:1])
                new = new[1:]
            self._append(sequence, new)
            sequence.growth_blocks -= count
            self.num_promised -= count
        self._open_for_writing(sequence, num_held)
        return True

    def _note_use(self, ids: IntArray, now: float, request_id: str) -> None:
        """These existing blocks are needed in HBM now."""
        in_hbm = self._table.has(ids, Tier.HBM)
        self._counters.used_blocks += len(ids)
        self._counters.used_in_hbm_blocks += int(np.count_nonzero(in_hbm))
        self._prefetcher.note_needed(ids)
        self._regret.note_needed(ids[~in_hbm], now)
        self._table.next_use[ids] = np.inf
        self._policy.on_use(self._table, ids, now, request_id)

    def _growth_blocks(self, sequence: Sequence, num_new_tokens: int) -> int:
        more = self.blocks_for(sequence.num_tokens + num_new_tokens) - len(sequence.block_ids)
        return max(0, more) + int(num_new_tokens > 0 and self._shared_tail(sequence))

    def _shared_tail(self, sequence: Sequence) -> bool:
        """The next token would be written into a block that another sequence holds too.

        The tail is where the next token goes, not the last block: after a failed step blocks without tokens follow it.
        """
        tail, used = divmod(sequence.num_tokens, self._block_size)
        if used == 0 or tail >= len(sequence.block_ids):
            return False
        return bool(self._table.ref_count[sequence.block_ids[tail]] > 1)

    def _try_new_blocks(self, count: int, now: float, request_id: str) -> IntArray | None:
        """OPEN, pinned blocks in HBM; None and no change if slots or rows are not free yet."""
        table = self._table
        if not self._room.make(Tier.HBM, count, now) or not self._room.make_rows(count, now):
            return None
        ids = table.try_allocate_in_hbm(count)
        assert ids is not None
        self._policy.on_allocate(table, ids, now, request_id)
        return ids

    def _append(self, sequence: Sequence, new: IntArray) -> None:
        first = len(sequence.block_ids)
        self._table.position[new] = np.arange(first, first + len(new))
        sequence.block_ids = np.concatenate([sequence.block_ids, new])
        sequence.hbm_slots = np.concatenate([sequence.hbm_slots, self._table.slots_of(new, Tier.HBM)])

    def _replace_tail(self, sequence: Sequence, new: IntArray) -> None:
        """Copy-on-write: the sequence gets a tail of its own."""
        table = self._table
        tail = sequence.num_tokens // self._block_size
        at = slice(tail, tail + 1)
        old = sequence.block_ids[at].copy()
        self._copy_in_hbm(table.slots_of(old, Tier.HBM), table.slots_of(new, Tier.HBM))
        table.unpin(old)
        table.ref_count[old] -= 1
        table.position[new] = tail
        sequence.block_ids[at] = new
        sequence.hbm_slots[at] = table.slots_of(new, Tier.HBM)
        self._room.release(old)

    def _open_for_writing(self, sequence: Sequence, num_old: int) -> None:
        """Copies of the blocks from the tail on are stale from now on, those in flight included.

        Of the blocks behind the first ``num_old`` there are none yet. No new copy of any is begun before the sequence
        leaves or is forked: they are OPEN and pinned.
        """
        written = sequence.block_ids[sequence.num_tokens // self._block_size : num_old]
        if len(written):
            self._table.generation[written] += 1
            self._drop_below_if_open(written)
        sequence.writable_tokens = len(sequence.block_ids) * self._block_size

    def _drop_below_if_open(self, ids: IntArray) -> None:
        table = self._table
        copied = ids[(table.present[ids] & ~TIER_BIT[Tier.HBM]) != 0]
        if not len(copied):
            return
        idle = copied[(table.state[copied] == BlockState.OPEN) & (table.busy[copied] == 0)]
        for tier in TIERS_BELOW_HBM:
            table.drop(idle[table.has(idle, tier)], tier)
