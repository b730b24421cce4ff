"""The page table: where every block is. A struct of arrays, one row per block_id, 59 bytes a row."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from enum import IntEnum

import numpy as np

from dflash2.errors import IntegrityError
from dflash2.table.slots import ForeignSlots, SlotAllocator
from dflash2.types import BoolArray, IntArray, Tier

TIER_BIT = {tier: np.uint8(1 << tier) for tier in Tier}


_ZERO_WHILE_FREE = ("present", "arriving", "busy", "ref_count", "pin_count", "num_children")
_ZEROED_AT_START = ("heat", "last_use", "position", "parent")
_MAX_BUSY = np.iinfo(np.uint16).max


class BlockState(IntEnum):
    """Life of a row."""

    FREE = 0
    OPEN = 1
    """The mutable tail of a sequence. A copy below HBM goes stale with the next write."""
    SEALED = 2
    """Full and immutable, private to the sequences that hold it."""
    PUBLISHED = 3
    """Full, immutable and found by its block_key."""


_OPEN, _HBM = BlockState.OPEN, Tier.HBM
"""Looking up a member of an enum takes as long as writing a column."""


class PageTable:
    """Rows for all blocks and the free slots of all tiers.

    Columns are public arrays indexed by block_id and read freely; they are written here and by the cache manager
    only, all from one thread. A tier's slot in ``slot`` means something only while the tier's bit is set in
    ``present`` (a complete, verified copy) or in ``arriving`` (being copied there, not to be read).

    Args:
        num_slots: slots of each tier; a missing tier has none.
        foreign: tiers whose slots an engine of its own gives out; the table mirrors which of them hold a block.
    """

    def __init__(self, num_slots: Mapping[Tier, int], foreign: Collection[Tier] = ()) -> None:
        self.tiers = {
            tier: (ForeignSlots if tier in foreign else SlotAllocator)(num_slots.get(tier, 0)) for tier in Tier
        }
        self.lasting = np.uint8(sum(TIER_BIT[tier] for tier in Tier if tier not in foreign))
        """Bits of the tiers whose copies stay until they are given up here: not those of a foreign tier."""
        self.num_rows = sum(allocator.num_slots for allocator in self.tiers.values())
        rows = self.num_rows
        self.slot = np.zeros((rows, len(Tier)), np.int32)
        self.present = np.zeros(rows, np.uint8)
        self.arriving = np.zeros(rows, np.uint8)
        self.state = np.zeros(rows, np.uint8)
        self.busy = np.zeros(rows, np.uint16)
        """Copies from or to this block, in flight or set apart for one: none of its slots may be given up."""
        self.ref_count = np.zeros(rows, np.int32)
        self.pin_count = np.zeros(rows, np.int16)
        """Resident or entering sequences that hold it: its HBM slot may not be given up."""
        self.generation = np.zeros(rows, np.uint32)
        """Counts reuse of the row and writes into an OPEN block; a copy made of an older generation is stale."""
        self.heat = np.zeros(rows, np.float32)
        self.last_use = np.zeros(rows, np.float64)
        self.next_use = np.full(rows, np.inf, np.float64)
        """Known time of the next use (s); inf where nothing is known."""
        self.position = np.zeros(rows, np.int32)
        """Index of the block in its sequence; 0 has no parent."""
        self.parent = np.zeros(rows, np.int32)
        self.num_children = np.zeros(rows, np.int32)
        self._rows = SlotAllocator(rows)
        self.num_pinned = 0
        """Distinct blocks with ``pin_count > 0``."""
        self.num_unpins = 0
        """Calls of ``unpin`` so far: blocks that could not be moved before perhaps can since the last one."""
        self._hbm_holder: IntArray = np.zeros(self.tiers[Tier.HBM].num_slots, np.int32)
        """For each HBM slot the block bound to it last; true only if that block says so as well."""

    @property
    def bytes_per_row(self) -> int:
        """All columns, and the list of what HBM slots hold, over the rows; rounded up."""
        columns = [value for value in vars(self).values() if isinstance(value, np.ndarray)]
        return -(-sum(column.nbytes for column in columns) // max(1, self.num_rows))

    @property
    def num_free_rows(self) -> int:
        return self._rows.num_free

    def num_free(self, tier: Tier) -> int:
        return self.tiers[tier].num_free

    def num_used(self, tier: Tier) -> int:
        return self.tiers[tier].num_used

    def capacity(self, tier: Tier) -> int:
        """Slots of the tier that can be used (all but the retired ones)."""
        return self.tiers[tier].num_slots - self.tiers[tier].num_retired

    def live(self) -> IntArray:
        """Ids of all rows in use."""
        return np.flatnonzero(self.state != BlockState.FREE).astype(np.int32)

    def has(self, ids: IntArray, tier: Tier) -> BoolArray:
        """bool ``[n]``: a complete copy is on ``tier``."""
        there: BoolArray = (self.present[ids] & TIER_BIT[tier]) != 0
        return there

    def by_fastest_tier(self, ids: IntArray) -> dict[Tier, IntArray]:
        """The given blocks by the fastest tier that has a complete copy; what has none is left out."""
        found, rest = {}, ids
        for tier in Tier:
            there = self.has(rest, tier)
            found[tier], rest = rest[there], rest[~there]
        return found

    def on_tier(self, tier: Tier) -> IntArray:
        """Ids of all blocks with a complete copy on ``tier``; for HBM in the order of their slots.

        HBM is looked through at nearly each step, and is a small part of the rows.
        """
        if tier is Tier.HBM:
            holders = self._hbm_holder
            at_home = self.has(holders, tier) & (self.slot[holders, tier] == np.arange(len(holders)))
            ids: IntArray = holders[at_home]
            return ids
        return np.flatnonzero(self.present & TIER_BIT[tier]).astype(np.int32)

    def slots_of(self, ids: IntArray, tier: Tier) -> IntArray:
        slots: IntArray = self.slot[ids, tier]
        return slots

    def try_allocate(self, count: int) -> IntArray | None:
        """New OPEN rows without a copy anywhere, or None (and no change) if the table is full."""
        ids = self._rows.try_take(count)
        if ids is None:
            return None
        at = _index(ids)
        self.state[at] = _OPEN
        self.generation[at] += 1
        for name in _ZEROED_AT_START:
            getattr(self, name)[at] = 0
        self.next_use[at] = np.inf
        return ids

    def try_allocate_in_hbm(self, count: int) -> IntArray | None:
        """New OPEN rows, each with a complete copy in HBM, one holder and one pin; None (and no change) if full."""
        hbm = self.tiers[_HBM]
        if count > hbm.num_free:
            return None
        ids = self.try_allocate(count)
        if ids is None:
            return None
        slots = hbm.try_take(count)
        assert slots is not None
        at = _index(ids)
        self.slot[ids, _HBM] = slots
        self.present[at] = TIER_BIT[_HBM]
        self._hbm_holder[slots] = ids
        self.ref_count[at] = 1
        self.pin_count[at] = 1
        self.num_pinned += count
        return ids

    def free(self, ids: IntArray) -> None:
        """Give up rows; all their copies must have been dropped before."""
        if any(np.any(getattr(self, name)[ids]) for name in _ZERO_WHILE_FREE):
            raise IntegrityError("a row was freed while it had a copy, a copy in flight, a holder or a follower")
        self.state[ids] = BlockState.FREE
        self._rows.give(ids)

    def place(self, ids: IntArray, tier: Tier, slots: IntArray) -> None:
        """Bind slots to blocks that are about to be copied to ``tier``; nothing is readable there yet."""
        self.slot[ids, tier] = slots
        self.arriving[ids] |= TIER_BIT[tier]
        if tier is Tier.HBM:
            self._hbm_holder[slots] = ids

    def settle(self, ids: IntArray, tier: Tier) -> None:
        """The copies on ``tier`` are complete and may be read."""
        self.arriving[ids] &= ~TIER_BIT[tier]
        self.present[ids] |= TIER_BIT[tier]

    def drop(self, ids: IntArray, tier: Tier, *, retire: bool = False) -> None:
        """Give up the slots of ``ids`` on ``tier``, complete or arriving; ``retire`` withdraws them for good."""
        slots = self.slot[ids, tier].copy()
        self.arriving[ids] &= ~TIER_BIT[tier]
        self.present[ids] &= ~TIER_BIT[tier]
        if retire:
            self.tiers[tier].retire(slots)
        else:
            self.tiers[tier].give(slots)

    def drop_failed(self, ids: IntArray, tier: Tier) -> None:
        """Give up slots on ``tier`` that a copy could not be written to; they are the last to be tried again."""
        self.arriving[ids] &= ~TIER_BIT[tier]
        self.tiers[tier].give_last(self.slot[ids, tier])

    def pin(self, ids: IntArray) -> None:
        """One more pin for each of these distinct blocks."""
        self.num_pinned += int(np.count_nonzero(self.pin_count[ids] == 0))
        self.pin_count[ids] += 1

    def unpin(self, ids: IntArray) -> None:
        self.num_unpins += 1
        self.pin_count[ids] -= 1
        self.num_pinned -= int(np.count_nonzero(self.pin_count[ids] == 0))

    def mark_busy(self, ids: IntArray) -> None:
        """One more copy from or to each of these blocks, which need not be distinct: each counts once.

        Raises:
            IntegrityError: a count is at its end (nothing has changed); wrapped to 0 it would give up slots in use.
        """
        if np.any(self.busy[ids] == _MAX_BUSY):
            raise IntegrityError(f"a block has {_MAX_BUSY} copies at a time")
        self.busy[ids] += 1

    def unmark_busy(self, ids: IntArray) -> None:
        """One copy less for each of these blocks; counted as by ``mark_busy``.

        Raises:
            IntegrityError: one of them has none (nothing has changed).
        """
        if not np.all(self.busy[ids]):
            raise IntegrityError("a copy ended of a block that has none")
        self.busy[ids] -= 1

    def check_integrity(self) -> None:
        """Raise IntegrityError if slots, rows, pins or states do not add up (invariants 1, 3, 4)."""
        live = self.live()
        self._rows.check_integrity(live)
        if np.any(self.present & self.arriving):
            raise IntegrityError("a copy is both complete and arriving")
        if np.any(self.ref_count < 0) or np.any(self.pin_count < 0):
            raise IntegrityError("a reference or pin count is negative")
        if self.num_pinned != int(np.count_nonzero(self.pin_count[live])):
            raise IntegrityError("the count of pinned blocks is wrong")
        free = self.state == BlockState.FREE
        for name in _ZERO_WHILE_FREE:
            if np.any(getattr(self, name)[free]):
                raise IntegrityError(f"a free row has {name}")
        for tier, allocator in self.tiers.items():
            holders = np.flatnonzero((self.present | self.arriving) & TIER_BIT[tier])
            allocator.check_integrity(self.slot[holders, tier])
        in_hbm = np.flatnonzero(self.present & TIER_BIT[Tier.HBM])
        if not np.array_equal(np.sort(self.on_tier(Tier.HBM)), in_hbm):
            raise IntegrityError("the list of what HBM slots hold is wrong")


def _index(ids: IntArray) -> IntArray | int:
    """The ids, or the id if there is but one: indexing by a number costs a tenth of indexing by an array."""
    return int(ids[0]) if len(ids) == 1 else ids
