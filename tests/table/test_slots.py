from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflash2.errors import IntegrityError
from dflash2.table.slots import SlotAllocator


def ids(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


def test_fresh_slots_ascend_so_that_runs_are_contiguous() -> None:
    slots = SlotAllocator(6)
    assert slots.try_take(3).tolist() == [0, 1, 2]
    assert slots.try_take(3).tolist() == [3, 4, 5]


def test_all_or_nothing() -> None:
    slots = SlotAllocator(3)
    slots.try_take(2)
    assert slots.try_take(2) is None
    assert (slots.num_free, slots.num_used) == (1, 2)


def test_slots_given_back_come_out_in_the_same_order() -> None:
    slots = SlotAllocator(4)
    taken = slots.try_take(4)
    slots.give(taken)
    assert slots.try_take(4).tolist() == taken.tolist()


def test_a_retired_slot_is_never_handed_out_again() -> None:
    slots = SlotAllocator(3)
    taken = slots.try_take(3)
    slots.retire(taken[1:2])
    slots.give(taken[[0, 2]])
    assert sorted(slots.try_take(2).tolist()) == [0, 2]
    assert slots.try_take(1) is None
    assert (slots.num_used, slots.num_retired) == (2, 1)
    slots.check_integrity(ids(0, 2))


def test_claim_takes_these_very_slots() -> None:
    slots = SlotAllocator(5)
    slots.claim(ids(3, 1))
    assert slots.try_take(3).tolist() == [0, 2, 4]
    with pytest.raises(IntegrityError):
        slots.claim(ids(1))


def test_giving_back_too_much_is_noticed() -> None:
    slots = SlotAllocator(2)
    with pytest.raises(IntegrityError):
        slots.give(ids(0))


@pytest.mark.parametrize("used", [(), (0,), (0, 1, 2), (0, 3)], ids=["leak", "too few", "too many", "wrong one"])
def test_integrity_wants_a_partition(used: tuple[int, ...]) -> None:
    slots = SlotAllocator(4)
    slots.try_take(2)
    slots.check_integrity(ids(0, 1))
    with pytest.raises(IntegrityError):
        slots.check_integrity(np.array(used, np.int32))


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 5))))
def test_no_slot_is_handed_out_twice(calls: list[tuple[bool, int]]) -> None:
    slots, held = SlotAllocator(8), []
    for take, count in calls:
        if take:
            got = slots.try_take(count)
            assert (got is None) == (count > 8 - len(held))
            held += [] if got is None else got.tolist()
        else:
            slots.give(np.array(held[:count], np.int32))
            held = held[count:]
        assert len(set(held)) == len(held) == slots.num_used
        slots.check_integrity(np.array(held, np.int32))
