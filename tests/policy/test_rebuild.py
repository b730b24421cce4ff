"""Deeper blocks cost more to compute again; where that is not known all cost the same."""

from __future__ import annotations

import numpy as np
import pytest

from dflash2.policy.rebuild import RebuildCost
from dflash2.policy.write_filter import WriteFilter


def test_a_block_at_the_position_given_costs_twice_as_much() -> None:
    assert RebuildCost(10.0).of(np.array([0, 5, 10], np.int32)).tolist() == [1.0, 1.5, 2.0]


def test_without_a_position_all_cost_the_same() -> None:
    assert RebuildCost().of(np.array([0, 1000], np.int32)).tolist() == [1.0, 1.0]
    assert RebuildCost().total(3, 10) == 7.0


@pytest.mark.parametrize(("first", "end"), [(0, 0), (0, 7), (4, 5), (3, 20)])
def test_the_total_is_the_sum(first: int, end: int) -> None:
    cost = RebuildCost(8.0)
    assert cost.total(first, end) == pytest.approx(float(cost.of(np.arange(first, end, dtype=np.int32)).sum()))


def test_what_is_cheap_to_compute_again_is_forgotten_rather_than_written() -> None:
    """Of blocks that are all equally likely to be used, those at the beginning of a prompt."""
    writes, cost = WriteFilter(), RebuildCost(10.0)
    position = np.tile(np.arange(40, dtype=np.int32), 10)
    chances = np.full(len(position), 0.05, np.float32) * cost.of(position)
    for _ in range(50):
        writes.note_return(300.0, 0.0)
        forgotten = writes.judge(chances)
    assert forgotten.any() and not forgotten.all()
    assert position[forgotten].max() < position[~forgotten].min() + 1
