"""A burst of four times what HBM holds: smoothed, unsmoothed, and first come, first served."""

from __future__ import annotations

import numpy as np
import pytest
from tests.fakes.burst import Case, Outcome, burst_lengths, first_come, run_burst

from dflash2.engine.base import FinishReason

LENGTHS = burst_lengths(seed=0)


@pytest.fixture(scope="module")
def smoothed() -> Outcome:
    return run_burst(LENGTHS, Case())


@pytest.fixture(scope="module")
def unsmoothed() -> Outcome:
    return run_burst(LENGTHS, Case(smoothing=False))


@pytest.fixture(scope="module")
def fcfs() -> Outcome:
    return run_burst(LENGTHS, first_come(Case(smoothing=False)))


def test_nothing_unplanned_happens_to_an_admitted_request(smoothed: Outcome, unsmoothed: Outcome) -> None:
    for outcome in (smoothed, unsmoothed):
        scheduler = outcome.stats["scheduler"]
        assert outcome.reasons == {FinishReason.LENGTH}
        assert scheduler["unplanned_swaps"] == scheduler["growth_waits"] == scheduler["preemptions_recomputed"] == 0
        assert scheduler["admitted_requests"] == len(LENGTHS) == len(outcome.finished_s)
        assert outcome.stats["counters"]["recomputed_tokens"] == 0
        assert outcome.stats["reserved_blocks"] == 0
        assert outcome.num_tokens == sum(answer for _, answer in LENGTHS)


def test_smoothing_swaps_less_and_is_no_slower(smoothed: Outcome, unsmoothed: Outcome) -> None:
    assert unsmoothed.swap_bytes > 0
    assert smoothed.swap_bytes <= 0.7 * unsmoothed.swap_bytes
    assert smoothed.makespan_s <= 1.05 * unsmoothed.makespan_s
    assert smoothed.num_tokens / smoothed.makespan_s >= 0.97 * unsmoothed.num_tokens / unsmoothed.makespan_s


def test_first_tokens_come_no_later_than_without_smoothing_and_answers_end_no_later(
    smoothed: Outcome, unsmoothed: Outcome
) -> None:
    for share in (0.5, 0.9, 0.99, 1.0):
        assert np.quantile(list(smoothed.ttft_s.values()), share) <= 1.05 * np.quantile(
            list(unsmoothed.ttft_s.values()), share
        )
    assert np.mean(list(smoothed.finished_s.values())) <= 1.05 * np.mean(list(unsmoothed.finished_s.values()))


def test_short_requests_start_soon_and_the_longest_ends_in_time(smoothed: Outcome, fcfs: Outcome) -> None:
    assert smoothed.ttft_of_short(200) <= 0.5 * fcfs.ttft_of_short(200)
    assert smoothed.finished_s[smoothed.longest] <= 1.5 * fcfs.finished_s[fcfs.longest]


def test_short_requests_that_find_hbm_full_start_soon_too() -> None:
    smoothed, fcfs = (run_burst(LENGTHS, case) for case in (Case(spread_s=3.0), first_come(Case(False, spread_s=3.0))))
    assert smoothed.ttft_of_short(200) <= 0.25 * fcfs.ttft_of_short(200)
    assert smoothed.finished_s[smoothed.longest] <= 1.5 * fcfs.finished_s[fcfs.longest]


def test_without_pressure_nobody_waits() -> None:
    outcome = run_burst([(60, 20)] * 8, Case(oversubscription=0.9))
    scheduler = outcome.stats["scheduler"]
    assert scheduler["admission"] == {"pressure_steps": 0, "smoothed_steps": 0}
    assert scheduler["stages"]["reserved"]["wait_s"] == 0.0
    assert outcome.swap_bytes == 0 or outcome.stats["counters"]["swap_in_bytes"] == 0


def test_nobody_is_held_back_longer_than_half_the_time_to_wait() -> None:
    lengths = burst_lengths(seed=2, count=24)
    patient, impatient = (run_burst(lengths, Case(timeout_s=timeout)) for timeout in (1e6, 4.0))
    assert impatient.reasons == {FinishReason.LENGTH}
    assert impatient.stats["scheduler"]["timed_out_requests"] == 0
    assert max(impatient.gap_s.values()) < 0.5 * max(patient.gap_s.values())
