from __future__ import annotations

import numpy as np
import pytest

from dflash2.cache import regret
from dflash2.cache.regret import RegretWatch
from dflash2.table.page_table import PageTable
from dflash2.types import IntArray, Tier


@pytest.fixture
def table() -> PageTable:
    return PageTable({Tier.HBM: 8})


@pytest.fixture
def ids(table: PageTable) -> IntArray:
    new = table.try_allocate(4)
    assert new is not None
    return new


def test_what_comes_back_within_the_horizon_is_regretted_once(table: PageTable, ids: IntArray) -> None:
    watch = RegretWatch(table)
    watch.note_demoted(ids, 100.0)
    watch.note_needed(ids[:2], 110.0)
    watch.note_needed(ids[:2], 111.0)
    assert watch.take() == (4, 2)
    assert watch.take() == (0, 0)


def test_what_comes_back_late_is_not(table: PageTable, ids: IntArray) -> None:
    watch = RegretWatch(table)
    watch.horizon_s = 5.0
    watch.note_demoted(ids, 100.0)
    watch.note_needed(ids[:1], 105.0)
    watch.note_needed(ids[1:], 105.1)
    assert watch.take() == (4, 1)


def test_what_was_never_demoted_is_not(table: PageTable, ids: IntArray) -> None:
    watch = RegretWatch(table)
    watch.note_needed(ids, 1.0)
    assert watch.take() == (0, 0)


def test_another_block_in_the_same_row_is_not(table: PageTable, ids: IntArray) -> None:
    watch = RegretWatch(table)
    watch.note_demoted(ids, 100.0)
    table.free(ids)
    assert set(table.try_allocate(4).tolist()) == set(ids.tolist())
    watch.note_needed(ids, 101.0)
    assert watch.take() == (4, 0)


def test_memory_is_bounded(table: PageTable, ids: IntArray, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(regret, "REMEMBERED", 2)
    watch = RegretWatch(table)
    watch.note_demoted(ids, 100.0)
    watch.note_needed(ids, 101.0)
    assert watch.take() == (4, 2)


def test_nothing_at_all(table: PageTable) -> None:
    watch = RegretWatch(table)
    watch.note_demoted(np.empty(0, np.int32), 1.0)
    assert watch.take() == (0, 0)
