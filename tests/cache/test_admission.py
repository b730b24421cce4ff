"""Smoothing, the bound on new demand, and the order of the line."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.signal import butter, sosfilt, sosfilt_zi

from dflash2.cache.admission import Admission
from dflash2.cache.smoothing import ButterworthLowPass
from dflash2.cache.waiting import join, length_class, short_beside

# -- the filter ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("order", [1, 2, 3, 4])
@pytest.mark.parametrize("cutoff", [0.001, 0.02, 0.2])
def test_it_is_scipys_butterworth_filter_cut_off_at_zero(order: int, cutoff: float) -> None:
    demand = np.random.default_rng(order).integers(0, 500, 300).astype(float)
    demand[100:200] = 0
    low_pass = ButterworthLowPass(order, cutoff)
    low_pass.reset(70.0)
    design = butter(order, cutoff, fs=1.0, output="sos")
    expected, _ = sosfilt(design, demand, zi=sosfilt_zi(design) * 70.0)
    got = [low_pass.step(value) for value in demand.tolist()]
    np.testing.assert_allclose(got, np.maximum(0.0, expected), rtol=1e-6, atol=1e-6)
    assert min(got) >= 0.0


def test_a_steady_demand_passes_unchanged_from_the_first_sample_on() -> None:
    low_pass = ButterworthLowPass(2, 0.01)
    low_pass.reset(40.0)
    assert [round(low_pass.step(40.0), 6) for _ in range(50)] == [40.0] * 50


def test_the_future_has_no_influence() -> None:
    one, other = ButterworthLowPass(2, 0.05), ButterworthLowPass(2, 0.05)
    before = [one.step(value) for value in (1.0, 5.0, 2.0)]
    assert [other.step(value) for value in (1.0, 5.0, 2.0)] == before
    assert one.step(1000.0) > other.step(0.0)


# -- the bound -------------------------------------------------------------------------------------------------------


def admission(order: int = 2, cutoff: float = 0.01) -> Admission:
    return Admission(100, ButterworthLowPass(order, cutoff))


def test_without_pressure_nobody_is_held_back() -> None:
    one = admission()
    one.tick(in_use=60, waiting=40)
    assert not one.under_pressure and one.lane_blocks == 0
    assert all(one.lets_in(10) for _ in range(4))
    assert one.counters.pressure_steps == one.counters.smoothed_steps == 0


def test_a_burst_is_held_to_what_is_in_hbm_at_first() -> None:
    one = admission(cutoff=0.001)
    one.tick(in_use=90, waiting=400)
    assert one.under_pressure and not one.lets_in(10) and not one.lets_in(1)
    assert one.counters.smoothed_steps == 1  # a step, not a request


def test_nobody_passes_one_that_is_held_back() -> None:
    one = admission()
    for _ in range(30):
        one.tick(in_use=100, waiting=300)
    assert not one.lets_in(400) and not one.lets_in(1)
    one.tick(in_use=100, waiting=300)
    assert one.lets_in(1)


def test_small_requests_have_a_lane_that_the_others_leave_free() -> None:
    one = Admission(640, ButterworthLowPass(2, 0.001))
    assert one.fits_lane(10) and not one.fits_lane(11)
    one.tick(in_use=600, waiting=1000, in_lane=15)
    assert one.lane_blocks == 25
    one.note_small(20)
    assert one.lane_blocks == 5
    one.note_small(20)
    assert one.lane_blocks == 0


def test_a_small_hbm_has_no_lane() -> None:
    one = Admission(10, ButterworthLowPass(2, 0.001))
    one.tick(in_use=9, waiting=5)
    assert not one.fits_lane(1) and one.lane_blocks == 0


def test_demand_that_stays_is_let_in_little_by_little() -> None:
    one, in_use, history = admission(), 100, []
    for _ in range(300):
        one.tick(in_use, 400 - in_use)
        while in_use < 400 and one.lets_in(10):
            in_use += 10
        history.append(in_use)
    assert history[0] == 100 and history[-1] == 400
    assert max(np.diff(history)) <= 20  # never a second burst


def test_the_bound_is_forgotten_when_pressure_ends() -> None:
    one = admission()
    for _ in range(500):
        one.tick(in_use=100, waiting=300)
    assert one.lets_in(295)
    one.tick(in_use=50, waiting=10)
    assert not one.under_pressure
    one.tick(in_use=100, waiting=300)
    assert not one.lets_in(5)


def test_without_a_filter_nobody_is_held_back() -> None:
    one = Admission(100, None)
    assert not one.smooths and admission().smooths
    one.tick(in_use=100, waiting=500)
    assert not one.under_pressure and one.lets_in(500)


def test_the_wait_is_foretold_from_the_pace_of_admissions() -> None:
    one = admission()
    assert one.expected_wait_s(10) == 0.0
    for step in range(100):
        one.note_admitted(step * 2.0)
    assert one.expected_wait_s(4) == pytest.approx(10.0)


# -- the line --------------------------------------------------------------------------------------------------------


@dataclass(eq=False)
class Waiter:
    size_tokens: int
    priority: int = 0
    overtaken_tokens: int = 0
    number: int = 0


def line_of(*sizes: int) -> deque[Waiter]:
    line: deque[Waiter] = deque()
    for number, size in enumerate(sizes):
        join(line, Waiter(size, number=number))
    return line


def test_short_ones_go_ahead_of_long_ones() -> None:
    assert [one.size_tokens for one in line_of(6000, 3000, 50, 100, 60)] == [50, 60, 100, 3000, 6000]


def test_equals_keep_the_order_in_which_they_came() -> None:
    line = line_of(100, 120, 90, 70, 65)
    assert [one.number for one in line] == [0, 1, 2, 3, 4]


def test_a_long_one_lets_as_much_pass_as_it_is_long() -> None:
    line = line_of(1000)
    for number in range(1, 16):
        join(line, Waiter(100, number=number))
    assert [one.number for one in line] == [*range(1, 11), 0, *range(11, 16)]


def test_priority_comes_before_length() -> None:
    line = line_of(1000, 50)
    join(line, Waiter(5000, priority=-1))
    join(line, Waiter(10, priority=5))
    assert [(one.priority, one.size_tokens) for one in line] == [(-1, 5000), (0, 50), (0, 1000), (5, 10)]


def test_who_is_short_depends_on_the_others() -> None:
    assert short_beside([]) == 0
    assert short_beside([100] * 50) < 100  # where all are alike nobody is
    assert short_beside([200] * 50 + [8000]) >= 200  # a single long one makes all others wait
    assert short_beside([50, 100, 200, 400, 800, 1600, 3200, 6000]) in range(400, 800)
    assert short_beside([5000, 6000, 7000, 8000]) in range(500, 5000)  # long ones are not made short by a large HBM


@given(st.lists(st.integers(1, 10_000), min_size=1), st.integers(2, 9))
def test_who_is_short_does_not_depend_on_the_scale(sizes: list[int], factor: int) -> None:
    bound = short_beside(sizes)
    scaled = short_beside([size * factor for size in sizes])
    assert {size for size in sizes if size <= bound} == {size for size in sizes if size * factor <= scaled}
    assert max(sizes) > bound


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 5000)), max_size=60))
def test_nobody_is_delayed_by_more_than_its_own_size(calls: list[tuple[bool, int]]) -> None:
    line: deque[Waiter] = deque()
    passed: dict[Waiter, int] = {}
    came = 0
    for leaves, size in calls:
        if leaves and line:
            line.popleft()
            continue
        new = Waiter(size, number=came)
        came += 1
        passed[new] = 0
        join(line, new)
        for one in list(line)[list(line).index(new) + 1 :]:
            passed[one] += size
            assert length_class(size) < length_class(one.size_tokens)
        assert all(passed[one] == one.overtaken_tokens <= one.size_tokens for one in line)
