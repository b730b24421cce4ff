from __future__ import annotations

import itertools

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from dflash2.transfer.plan import merge_runs, run_starts


def runs(src: list[int], dst: list[int]) -> list[tuple[int, int, int]]:
    return merge_runs(np.array(src, dtype=np.int32), np.array(dst, dtype=np.int32))


def test_neighbours_on_both_sides_become_one_run() -> None:
    assert runs([4, 5, 6], [0, 1, 2]) == [(4, 0, 3)]
    assert runs([4, 5, 6], [0, 2, 3]) == [(4, 0, 1), (5, 2, 2)]
    assert runs([6, 5, 4], [2, 1, 0]) == [(6, 2, 1), (5, 1, 1), (4, 0, 1)]
    assert runs([3], [9]) == [(3, 9, 1)]
    assert runs([], []) == []


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30)), max_size=40))
def test_runs_name_every_pair_once_in_order(pairs: list[tuple[int, int]]) -> None:
    merged = runs([a for a, _ in pairs], [b for _, b in pairs])
    assert [(a + i, b + i) for a, b, length in merged for i in range(length)] == pairs
    for (a, b, length), (c, d, _) in itertools.pairwise(merged):
        assert (a + length, b + length) != (c, d), "two runs that could be one"


def test_run_starts_of_one_column() -> None:
    assert run_starts(np.array([5, 6, 7, 2, 3, 9], dtype=np.int32)).tolist() == [0, 3, 5]
