from __future__ import annotations

import itertools

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from dflash2.transfer.plan import Run, merge_runs


def runs(src: list[int], dst: list[int]) -> list[Run]:
    return merge_runs(np.array(src, dtype=np.int32), np.array(dst, dtype=np.int32))


def test_neighbouring_destinations_become_one_run() -> None:
    assert runs([4, 5, 6], [0, 1, 2]) == [Run(0, [4, 5, 6])]
    assert runs([4, 5, 6], [0, 2, 3]) == [Run(0, [4]), Run(2, [5, 6])]
    assert runs([6, 5, 4], [2, 1, 0]) == [Run(0, [4, 5, 6])]
    assert runs([9, 1, 5], [8, 7, 9]) == [Run(7, [1, 9, 5])]
    assert runs([], []) == []


def test_a_run_is_straight_if_its_sources_are_neighbours_in_order() -> None:
    assert Run(0, [7]).is_straight
    assert Run(0, [7, 8, 9]).is_straight
    assert not Run(0, [9, 8, 7]).is_straight
    assert not Run(0, [7, 9]).is_straight


@given(st.dictionaries(st.integers(0, 40), st.integers(0, 40), max_size=40))
def test_runs_name_every_pair_once_and_are_as_few_as_can_be(pairs: dict[int, int]) -> None:
    merged = runs(list(pairs.values()), list(pairs))
    named = [(run.dst + i, src) for run in merged for i, src in enumerate(run.src)]
    assert sorted(named) == sorted(pairs.items())
    for first, second in itertools.pairwise(merged):
        assert first.dst + len(first.src) < second.dst
