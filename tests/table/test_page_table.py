from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from dflash2.errors import IntegrityError
from dflash2.table.page_table import BlockState, PageTable
from dflash2.types import IntArray, Tier

SLOTS = {Tier.HBM: 4, Tier.DRAM: 3, Tier.NVME: 2}


def place(table: PageTable, ids: IntArray, tier: Tier) -> IntArray:
    slots = table.tiers[tier].try_take(len(ids))
    assert slots is not None
    table.place(ids, tier, slots)
    return slots


@pytest.fixture
def table() -> PageTable:
    return PageTable(SLOTS)


@pytest.fixture
def ids(table: PageTable) -> IntArray:
    """Two OPEN blocks, complete in HBM, held by nobody."""
    new = table.try_allocate(2)
    assert new is not None
    place(table, new, Tier.HBM)
    table.settle(new, Tier.HBM)
    return new


def test_a_row_takes_at_most_64_bytes() -> None:
    """With an eighth of the blocks in HBM; the list of HBM slots counts as well."""
    table = PageTable({Tier.HBM: 1_000, Tier.DRAM: 3_000, Tier.NVME: 4_000})
    columns = [value for value in vars(table).values() if isinstance(value, np.ndarray)]
    assert len(columns) >= 14
    assert table.bytes_per_row * table.num_rows >= sum(column.nbytes for column in columns)
    assert table.bytes_per_row <= 64


def test_blocks_on_a_tier_are_those_with_a_complete_copy(table: PageTable, ids: IntArray) -> None:
    assert sorted(table.on_tier(Tier.HBM).tolist()) == sorted(ids.tolist())
    # A slot that changes hands belongs to the new block alone, and that only when it has arrived.
    old = table.slots_of(ids[:1], Tier.HBM).copy()
    table.drop(ids[:1], Tier.HBM)
    other = table.try_allocate(1)
    slots = table.tiers[Tier.HBM].try_take(1)
    assert other is not None and slots is not None and slots.tolist() == old.tolist()
    table.place(other, Tier.HBM, slots)
    assert table.on_tier(Tier.HBM).tolist() == ids[1:].tolist()
    table.settle(other, Tier.HBM)
    assert sorted(table.on_tier(Tier.HBM).tolist()) == sorted([*ids[1:].tolist(), *other.tolist()])
    assert table.on_tier(Tier.DRAM).tolist() == []


def test_each_block_counts_on_the_fastest_tier_that_has_it_complete(table: PageTable, ids: IntArray) -> None:
    nowhere = table.try_allocate(1)
    assert nowhere is not None
    place(table, nowhere, Tier.NVME)  # still arriving
    place(table, ids, Tier.DRAM)
    table.settle(ids, Tier.DRAM)
    table.drop(ids[:1], Tier.HBM)
    found = table.by_fastest_tier(np.concatenate([nowhere, ids]))
    assert {tier: there.tolist() for tier, there in found.items()} == {
        Tier.HBM: ids[1:].tolist(),
        Tier.DRAM: ids[:1].tolist(),
        Tier.NVME: [],
    }


def test_there_is_a_row_for_every_slot(table: PageTable) -> None:
    assert table.num_rows == table.num_free_rows == 9
    assert table.try_allocate(10) is None
    assert table.num_free_rows == 9
    assert len(table.try_allocate(9)) == 9


def test_a_tier_that_is_not_named_has_no_slots() -> None:
    table = PageTable({Tier.HBM: 2})
    assert table.capacity(Tier.DRAM) == table.num_free(Tier.NVME) == 0
    table.check_integrity()


def test_a_copy_can_be_read_only_after_it_has_settled(table: PageTable, ids: IntArray) -> None:
    place(table, ids, Tier.DRAM)
    assert table.on_tier(Tier.DRAM).tolist() == []
    assert table.has(ids, Tier.HBM).all() and not table.has(ids, Tier.DRAM).any()
    table.settle(ids[:1], Tier.DRAM)
    assert table.has(ids, Tier.DRAM).tolist() == [True, False]
    table.check_integrity()


def test_block_ids_are_not_slots(table: PageTable, ids: IntArray) -> None:
    assert place(table, ids[1:], Tier.DRAM).tolist() == [0]
    assert ids[1] == 1
    assert table.slots_of(ids[1:], Tier.DRAM).tolist() == [0]


def test_dropping_gives_slots_back_complete_or_arriving(table: PageTable, ids: IntArray) -> None:
    place(table, ids, Tier.DRAM)
    table.settle(ids[:1], Tier.DRAM)
    table.drop(ids, Tier.DRAM)
    assert table.num_free(Tier.DRAM) == 3
    table.drop(ids[:1], Tier.HBM, retire=True)
    assert (table.capacity(Tier.HBM), table.num_used(Tier.HBM)) == (3, 1)
    table.check_integrity()


def test_a_reused_row_starts_afresh(table: PageTable, ids: IntArray) -> None:
    generation = table.generation[ids].copy()
    table.heat[ids] = 1
    table.next_use[ids] = 5.0
    table.drop(ids, Tier.HBM)
    table.free(ids)
    assert table.live().tolist() == []
    again = table.try_allocate(2)
    assert set(again.tolist()) == set(ids.tolist())
    assert (table.generation[again] > generation).all()
    assert not table.heat[again].any() and np.isinf(table.next_use[again]).all()
    assert (table.state[again] == BlockState.OPEN).all()


@pytest.mark.parametrize("what", ["copy", "arriving", "busy", "held"])
def test_a_row_in_use_cannot_be_freed(table: PageTable, ids: IntArray, what: str) -> None:
    if what != "copy":
        table.drop(ids, Tier.HBM)
    if what == "arriving":
        place(table, ids, Tier.DRAM)
    table.busy[ids] = what == "busy"
    table.ref_count[ids] = what == "held"
    with pytest.raises(IntegrityError):
        table.free(ids)


def test_a_block_may_be_wanted_by_very_many_and_the_count_never_wraps(table: PageTable, ids: IntArray) -> None:
    for _ in range(300):
        table.mark_busy(ids)
    assert table.busy[ids].tolist() == [300, 300]
    table.busy[ids[0]] = np.iinfo(table.busy.dtype).max
    with pytest.raises(IntegrityError, match="copies at a time"):
        table.mark_busy(ids)
    assert table.busy[ids[1]] == 300, "nothing changed"
    table.busy[ids[1]] = 0
    with pytest.raises(IntegrityError, match="has none"):
        table.unmark_busy(ids)


def test_pins_are_counted_by_distinct_blocks(table: PageTable, ids: IntArray) -> None:
    table.pin(ids)
    table.pin(ids[:1])
    assert table.num_pinned == 2
    table.unpin(ids)
    assert table.num_pinned == 1
    table.unpin(ids[:1])
    assert table.num_pinned == 0
    table.check_integrity()


def _twice(table: PageTable) -> None:
    table.slot[1, Tier.HBM] = table.slot[0, Tier.HBM]


def _negative(table: PageTable) -> None:
    table.pin_count[0] = -1


def _both(table: PageTable) -> None:
    table.arriving[0] |= 1


def _pinned(table: PageTable) -> None:
    table.num_pinned += 1


def _freed(table: PageTable) -> None:
    table.state[0] = BlockState.FREE


def _leaked(table: PageTable) -> None:
    table.present[0] = 0


@pytest.mark.parametrize("damage", [_twice, _negative, _both, _pinned, _freed, _leaked])
def test_damage_is_noticed(table: PageTable, ids: IntArray, damage: Callable[[PageTable], None]) -> None:
    table.check_integrity()
    damage(table)
    with pytest.raises(IntegrityError):
        table.check_integrity()
