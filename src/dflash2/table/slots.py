"""Which slots of one tier (or rows of the page table) are free."""

from __future__ import annotations

import numpy as np

from dflash2.errors import IntegrityError
from dflash2.types import BoolArray, IntArray


class SlotAllocator:
    """A stack of free slot numbers. Fresh slots come out in ascending order, so that new runs are contiguous."""

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self._stack: IntArray = np.arange(num_slots - 1, -1, -1, dtype=np.int32)
        self._num_free = num_slots
        self._retired: set[int] = set()

    @property
    def num_free(self) -> int:
        return self._num_free

    @property
    def num_used(self) -> int:
        """Slots that hold or await a block."""
        return self.num_slots - self._num_free - len(self._retired)

    @property
    def num_retired(self) -> int:
        """Slots withdrawn for good because their medium failed."""
        return len(self._retired)

    def try_take(self, count: int) -> IntArray | None:
        """Take ``count`` slots, or None (and no change) if fewer are free."""
        if count > self._num_free:
            return None
        self._num_free -= count
        return self._stack[self._num_free : self._num_free + count][::-1].copy()

    def claim(self, slots: IntArray) -> None:
        """Take these very slots, which must be free: they hold something from an earlier run."""
        kept = self._stack[: self._num_free]
        kept = kept[~np.isin(kept, slots)]
        if self._num_free - len(kept) != len(slots):
            raise IntegrityError("a slot to be claimed is not free")
        self._stack[: len(kept)] = kept
        self._num_free = len(kept)

    def give(self, slots: IntArray) -> None:
        """Return slots taken before."""
        count = len(slots)
        if self._num_free + count > self.num_slots:
            raise IntegrityError("more slots given back than were taken")
        self._stack[self._num_free : self._num_free + count] = slots[::-1]
        self._num_free += count

    def give_last(self, slots: IntArray) -> None:
        """Return slots that could not be written: all others are handed out before them."""
        self.give(slots)
        self._stack[: self._num_free] = np.roll(self._stack[: self._num_free], len(slots))

    def withdraw(self, slots: IntArray) -> None:
        """Retire those of these slots that are free."""
        free = self._stack[: self._num_free]
        bad = np.isin(free, slots)
        self.retire(free[bad])
        kept = free[~bad]
        self._stack[: len(kept)] = kept
        self._num_free = len(kept)

    def retire(self, slots: IntArray) -> None:
        """Withdraw slots taken before: they are never handed out again."""
        self._retired.update(int(slot) for slot in slots)

    def free_slots(self) -> IntArray:
        """Copy of the free slots, for integrity checks."""
        return self._stack[: self._num_free].copy()

    def check_integrity(self, used: IntArray) -> None:
        """Raise IntegrityError unless ``used``, the free and the retired slots partition the tier."""
        every = np.concatenate([used, self.free_slots(), np.fromiter(self._retired, np.int32, len(self._retired))])
        if len(every) != self.num_slots or len(np.unique(every)) != self.num_slots:
            raise IntegrityError(
                f"slots do not add up: {len(used)} used + {self._num_free} free + {len(self._retired)} retired "
                f"of {self.num_slots}, {len(np.unique(every))} distinct"
            )


class ForeignSlots(SlotAllocator):
    """Slots that somebody else gives out (an engine's own pool): here it is only noted which of them hold a block.

    ``claim`` and ``give`` take time in proportion to the slots named, whatever the size of the pool.
    """

    def __init__(self, num_slots: int) -> None:
        super().__init__(0)
        self.num_slots = num_slots
        self._used: BoolArray = np.zeros(num_slots, np.bool_)
        self._num_free = num_slots

    def try_take(self, count: int) -> IntArray | None:
        """None unless nothing is asked for: the owner decides which slots are used."""
        return np.empty(0, np.int32) if count == 0 else None

    def claim(self, slots: IntArray) -> None:
        """The owner has put a block at each of these distinct slots."""
        if np.any(self._used[slots]):
            raise IntegrityError("a slot to be claimed holds a block already")
        self._used[slots] = True
        self._num_free -= len(slots)

    def give(self, slots: IntArray) -> None:
        """The blocks at these slots are gone."""
        if not np.all(self._used[slots]):
            raise IntegrityError("a slot was given back that held no block")
        self._used[slots] = False
        self._num_free += len(slots)

    def give_last(self, slots: IntArray) -> None:
        """As ``give``: the owner decides who comes next."""
        self.give(slots)

    def holds(self, slots: IntArray) -> BoolArray:
        """bool ``[n]``: which of these slots hold a block."""
        held: BoolArray = self._used[slots]
        return held

    def free_slots(self) -> IntArray:
        """Slots that hold no block."""
        return np.flatnonzero(~self._used).astype(np.int32)
