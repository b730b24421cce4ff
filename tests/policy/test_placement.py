"""Heat and LRU on a bare table."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflash2.policy.base import Outcome, PlacementPolicy, RequestTraits
from dflash2.policy.heat import HEAT_AT_HORIZON, HeatPolicy
from dflash2.policy.horizon import LONGEST_S, SHORTEST_S, TurnoverHorizon
from dflash2.policy.lru import LRUPolicy
from dflash2.table.page_table import PageTable
from dflash2.types import IntArray, Tier

START = 100.0


def policies() -> list[PlacementPolicy]:
    return [HeatPolicy(8, 0.8), LRUPolicy(8)]


def make(policy: PlacementPolicy, count: int = 4, now: float = START) -> tuple[PageTable, IntArray]:
    """Blocks of one sequence, allocated at once."""
    table = PageTable({Tier.HBM: 8})
    ids = table.try_allocate(count)
    assert ids is not None
    table.position[ids] = np.arange(count)
    policy.on_allocate(table, ids, now, None)
    return table, ids


@given(
    uses=st.lists(st.tuples(st.integers(0, 15), st.floats(0, 500)), max_size=20),
    known=st.lists(st.floats(-100, 10_000), min_size=4, max_size=4),
    after=st.floats(0, 1e6),
    pinned=st.integers(0, 15),
)
def test_heat_lies_between_0_and_1(
    uses: list[tuple[int, float]], known: list[float], after: float, pinned: int
) -> None:
    for policy in policies():
        table, ids = make(policy)
        table.next_use[ids[:2]] = np.array(known[:2]) + START
        table.pin(ids[[bool(pinned >> i & 1) for i in range(4)]])
        now = START
        for mask, gap in uses:
            now += gap
            policy.on_use(table, ids[[bool(mask >> i & 1) for i in range(4)]], now, None)
        policy.refresh(table, now + after)
        heat = table.heat[ids]
        assert np.isfinite(heat).all() and (heat >= 0).all() and (heat <= 1).all()


def ask(policy: HeatPolicy, name: str, keys: list[int], now: float, traits: RequestTraits | None = None) -> None:
    policy.on_arrival(name, traits or RequestTraits(num_prompt_tokens=8 * len(keys)), keys, now)


def test_what_came_back_regularly_is_hot_while_it_is_due_and_cools_when_it_does_not_come() -> None:
    policy = HeatPolicy(8, 0.8)
    table, ids = make(policy)
    now = START
    for turn in range(200):
        name = str(turn)
        ask(policy, name, [1, 2, 3, 4], now)
        policy.on_use(table, ids, now, name)
        policy.on_finish(name, Outcome("tool_use", 10), now + 1.0)
        policy.on_allocate(table, ids[:0], now, None)
        now += 6.0
    due = policy.heat(table, ids, now - 2.0)
    assert (due > 0.9).all() and policy.is_cold(table, ids, now - 2.0).sum() == 0
    assert (policy.heat(table, ids, now + 1e4) < 0.2).all()


def test_the_threshold_divides_cold_from_hot() -> None:
    policy = HeatPolicy(8, 0.8)
    table, ids = make(policy)
    table.next_use[ids[:2]] = START + 0.1
    assert policy.is_cold(table, ids, START).tolist() == [False, False, True, True]
    policy.effective_threshold = 0.9999
    assert policy.is_cold(table, ids, START).all()
    policy.effective_threshold = 0.0001
    assert not policy.is_cold(table, ids, START).any()


def test_what_is_pinned_is_fully_hot() -> None:
    policy = HeatPolicy(8, 0.99)
    table, ids = make(policy)
    table.pin(ids[:1])
    assert policy.is_cold(table, ids, START + 1e5).tolist() == [False, True, True, True]


def test_a_known_next_use_is_worth_more_than_a_guess() -> None:
    policy = HeatPolicy(8, 0.8)
    table, ids = make(policy)
    now = START + 1_000.0
    horizon = policy.horizon_s(now)
    table.next_use[ids] = now + np.array([-5.0, 0.0, horizon, 50 * horizon])
    heat = policy.heat(table, ids, now)
    assert heat[:3].tolist() == pytest.approx([1.0, 1.0, HEAT_AT_HORIZON])
    assert heat[3] < 0.2
    assert policy.order(table, ids, 2, now).tolist() == ids[[3, 2]].tolist()


def test_lru_order_is_by_last_use() -> None:
    policy = LRUPolicy(8)
    table, ids = make(policy)
    for at, index in enumerate([2, 0, 3, 1]):
        policy.on_use(table, ids[[index]], START + 1 + at, None)
    assert policy.order(table, ids, 3, START + 10).tolist() == ids[[2, 0, 3]].tolist()
    assert policy.is_cold(table, ids, START + 10).all()
    policy.refresh(table, START + 10)
    assert table.heat[ids].tolist() == [0.5, 1.0, 0.25, 0.75]


@pytest.mark.parametrize("policy", policies(), ids=["heat", "lru"])
def test_followers_go_before_their_parents(policy: PlacementPolicy) -> None:
    table, ids = make(policy)
    policy.on_use(table, ids, START + 1, None)
    assert policy.order(table, ids, 4, START + 5).tolist() == ids[::-1].tolist()
    table.next_use[ids] = START + 50
    assert policy.order(table, ids, 4, START + 5).tolist() == ids[::-1].tolist()


@pytest.mark.parametrize("policy", policies(), ids=["heat", "lru"])
def test_an_empty_table_is_no_problem(policy: PlacementPolicy) -> None:
    table = PageTable({Tier.HBM: 2})
    nothing = np.empty(0, np.int32)
    policy.refresh(table, START)
    policy.on_use(table, nothing, START, None)
    assert len(policy.order(table, nothing, 3, START)) == 0
    assert len(policy.is_cold(table, nothing, START)) == 0


def test_the_horizon_is_the_time_in_which_hbm_turns_over() -> None:
    horizon = TurnoverHorizon(100, initial_s=60.0)
    assert horizon.seconds(0.0) == pytest.approx(60.0)
    for tick in range(1, 1_001):  # 5 slots every 0.1 s: 50 a second
        horizon.note(5, tick * 0.1)
    assert horizon.seconds(100.0) == pytest.approx(2.0, rel=0.05)
    # Nothing is taken any more: it stretches, within bounds.
    assert horizon.seconds(110.0) > 2 * horizon.seconds(100.0)
    assert horizon.seconds(1e6) == LONGEST_S
    horizon.note(100_000, 101.0)
    assert horizon.seconds(101.0) == SHORTEST_S


def test_a_clock_that_steps_back_does_no_harm() -> None:
    horizon = TurnoverHorizon(100)
    horizon.note(5, 50.0)
    horizon.note(5, 40.0)
    assert SHORTEST_S <= horizon.seconds(30.0) <= LONGEST_S
