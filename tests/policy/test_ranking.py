from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from dflash2.policy.ranking import smallest_first

ROWS = st.lists(st.tuples(st.integers(0, 4), st.integers(0, 5)), max_size=30)


@given(ROWS, st.integers(0, 40))
def test_equals_a_plain_sort(rows: list[tuple[int, int]], count: int) -> None:
    ids = np.arange(len(rows), dtype=np.int32)[::-1].copy()
    score = np.array([row[0] for row in rows], np.float64)
    position = np.array([row[1] for row in rows], np.int32)
    got = smallest_first(ids, score, position, count)
    every = sorted(zip(score, -position, range(len(rows)), ids.tolist(), strict=True))
    assert got.tolist() == [entry[3] for entry in every][:count]


def test_a_negative_count_is_nothing() -> None:
    assert len(smallest_first(np.array([1], np.int32), np.zeros(1), np.zeros(1, np.int32), -1)) == 0
