from __future__ import annotations

import logging

import pytest

from dflash2.policy.adaptive import FLOOR, MIN_SAMPLE, AdaptiveThreshold, Evidence


def rounds(guard: AdaptiveThreshold, count: int, regretted: float) -> float:
    for _ in range(count):
        guard.note(Evidence(demoted=100, regretted=int(100 * regretted)))
        guard.update()
    return guard.effective


def test_regret_lowers_the_threshold_down_to_a_floor() -> None:
    guard = AdaptiveThreshold(0.99)
    assert rounds(guard, 1, 0.5) == pytest.approx(0.99 * 0.8)
    assert rounds(guard, 50, 0.5) == FLOOR


def test_it_comes_back_up_to_what_was_configured() -> None:
    guard = AdaptiveThreshold(0.8)
    rounds(guard, 5, 0.9)
    assert rounds(guard, 1, 0.0) < 0.8
    assert rounds(guard, 50, 0.0) == 0.8


def test_in_between_it_stays() -> None:
    guard = AdaptiveThreshold(0.8)
    rounds(guard, 2, 0.5)
    before = guard.effective
    assert rounds(guard, 10, 0.2) == before


def test_little_evidence_is_collected_not_judged() -> None:
    guard = AdaptiveThreshold(0.8)
    for _ in range(MIN_SAMPLE - 1):
        guard.note(Evidence(demoted=1, regretted=1))
        assert guard.update() == 0.8
    guard.note(Evidence(demoted=1, regretted=1))
    assert guard.update() < 0.8


def test_from_a_threshold_of_zero_it_goes_to_what_is_configured_next() -> None:
    guard = AdaptiveThreshold(0.8)
    rounds(guard, 3, 1.0)
    guard.configure(0.0)
    assert guard.effective == 0.0
    guard.configure(0.5)
    assert guard.effective == 0.5


def test_a_threshold_configured_below_the_floor_is_left_alone() -> None:
    guard = AdaptiveThreshold(0.05)
    assert rounds(guard, 10, 1.0) == 0.05


def test_it_says_when_it_moves_and_only_then(caplog: pytest.LogCaptureFixture) -> None:
    guard = AdaptiveThreshold(0.8)
    with caplog.at_level(logging.INFO):
        rounds(guard, 3, 0.0)
        assert not caplog.messages
        rounds(guard, 1, 0.6)
    assert len(caplog.messages) == 1
    assert "0.80 -> 0.64" in caplog.messages[0] and "60 %" in caplog.messages[0]


def test_another_threshold_of_the_users_keeps_what_was_learned_and_is_not_overwritten() -> None:
    guard = AdaptiveThreshold(0.8)
    rounds(guard, 2, 0.9)
    lowered = guard.effective / 0.8
    guard.configure(0.6)
    assert (guard.configured, guard.effective) == (0.6, pytest.approx(0.6 * lowered))
    assert rounds(guard, 50, 0.0) == 0.6


def traffic(guard: AdaptiveThreshold, missed: int, hit_rates: list[float]) -> list[float]:
    """Thresholds while blocks that were demoted long ago are loaded again, at these hit rates."""
    thresholds = []
    for hit_rate in hit_rates:
        guard.note(Evidence(demoted=100, regretted=0, used=round(missed / (1.0 - hit_rate)), missed=missed))
        thresholds.append(guard.update())
    return thresholds


def test_traffic_that_brings_no_hits_lowers_the_threshold() -> None:
    first, *later = traffic(AdaptiveThreshold(0.8), 90, [0.9] * 20)
    assert first == 0.8  # there was nothing to compare with
    assert later == sorted(later, reverse=True) and later[0] < 0.8 and later[-1] == FLOOR


def test_traffic_that_pays_leaves_it_alone() -> None:
    assert set(traffic(AdaptiveThreshold(0.8), 90, [0.5, 0.6, 0.7, 0.8, 0.9])) == {0.8}


def test_room_made_for_what_is_new_is_no_exchange() -> None:
    """Few of the blocks that left are loaded again, so demoting them was right, whatever the hit rate does."""
    assert set(traffic(AdaptiveThreshold(0.8), 10, [0.9] * 20)) == {0.8}


def test_it_comes_back_up_when_blocks_are_no_longer_exchanged() -> None:
    guard = AdaptiveThreshold(0.8)
    assert traffic(guard, 90, [0.9] * 20)[-1] == FLOOR
    assert traffic(guard, 10, [0.9] * 40)[-1] == 0.8
