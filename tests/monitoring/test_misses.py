"""Misses are counted per block, for as long as its row holds it."""

from __future__ import annotations

import numpy as np
import pytest

from dflash2.monitoring import misses
from dflash2.monitoring.misses import BlockMisses
from dflash2.table.page_table import PageTable
from dflash2.types import IntArray, Tier


def ids(*values: int) -> IntArray:
    return np.array(values, np.int32)


@pytest.fixture
def table() -> PageTable:
    table = PageTable({Tier.HBM: 8})
    assert table.try_allocate(8) is not None
    return table


def test_the_worst_come_first(table: PageTable) -> None:
    counts = BlockMisses(table)
    for missed in (ids(1, 2), ids(2, 3), ids(2)):
        counts.note(missed)
    assert counts.worst(2) == [(2, 3), (1, 1)] and counts.of(3) == 1 and counts.of(7) == 0


def test_a_row_that_was_given_to_another_block_starts_anew(table: PageTable) -> None:
    counts = BlockMisses(table)
    counts.note(ids(4, 5))
    table.generation[4] += 1
    assert counts.of(4) == 0 and counts.worst(9) == [(5, 1)]
    counts.note(ids(4))
    assert counts.of(4) == 1


def test_the_memory_is_bounded(table: PageTable, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(misses, "REMEMBERED", 3)
    counts = BlockMisses(table)
    counts.note(ids(0, 1, 2, 3))
    assert [counts.of(block) for block in range(4)] == [0, 1, 1, 1]
