"""Quantiles per class, censored by max_tokens, and what is reserved while nothing is known."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflash2.pipeline.estimator import MIN_ENDED, UNKNOWN_TOKENS, LengthEstimator, RequestClass

CHAT = RequestClass.of(500, 4096, None)
TOOL = RequestClass.of(20, 4096, None)


def taught(kind: RequestClass, lengths: list[int]) -> LengthEstimator:
    estimator = LengthEstimator()
    for length in lengths:
        estimator.note(kind, length, ended=True)
    return estimator


def test_nothing_known() -> None:
    estimator = LengthEstimator()
    assert estimator.total_tokens(CHAT, 4096) == UNKNOWN_TOKENS
    assert estimator.total_tokens(CHAT, 200) == 200
    assert estimator.total_tokens(CHAT, 4096, produced=UNKNOWN_TOKENS) == 2 * UNKNOWN_TOKENS
    assert estimator.total_tokens(CHAT, 4096, produced=4000) == 4096


def test_the_quantile_of_a_known_class() -> None:
    lengths = np.random.default_rng(0).integers(1, 1001, 2000).tolist()
    guess = taught(CHAT, lengths).total_tokens(CHAT, 4096)
    within = np.mean(np.array(lengths) <= guess)
    assert within >= 0.95
    assert guess < 1100  # a bucket is a ninth wide


def test_classes_do_not_mix_and_a_new_one_begins_with_what_all_have_in_common() -> None:
    estimator = taught(CHAT, [2000] * 100)
    assert estimator.total_tokens(TOOL, 4096) >= 2000
    for _ in range(MIN_ENDED):
        estimator.note(TOOL, 10, ended=True)
    assert estimator.total_tokens(TOOL, 4096) < 16
    assert estimator.total_tokens(CHAT, 4096) >= 2000
    assert RequestClass.of(20, 4096, "french") != TOOL


def test_an_answer_that_went_on_is_estimated_among_those_that_did() -> None:
    estimator = taught(CHAT, [10] * 95 + [1000] * 5)
    assert estimator.total_tokens(CHAT, 4096) < 20
    assert 1000 <= estimator.total_tokens(CHAT, 4096, produced=20) < 1300
    assert estimator.total_tokens(CHAT, 4096, produced=2000) == 4000  # longer than any


def test_answers_that_were_cut_off_are_not_taken_for_short_ones() -> None:
    estimator = LengthEstimator()
    for _ in range(50):
        estimator.note(CHAT, 100, ended=False)
        estimator.note(CHAT, 800, ended=True)
    assert estimator.total_tokens(CHAT, 4096) >= 800
    only_cut_off = LengthEstimator()
    for _ in range(MIN_ENDED):
        only_cut_off.note(CHAT, 5, ended=True)
        for _ in range(20):
            only_cut_off.note(CHAT, 100, ended=False)
    assert only_cut_off.total_tokens(CHAT, 4096) == 4096


def test_what_clients_ask_for_changes() -> None:
    estimator = taught(CHAT, [3000] * 512)
    for _ in range(3000):
        estimator.note(CHAT, 30, ended=True)
    assert estimator.total_tokens(CHAT, 4096) < 64


@given(
    st.lists(st.tuples(st.integers(0, 10**6), st.booleans()), max_size=60),
    st.integers(1, 10**6),
    st.data(),
)
def test_the_estimate_is_more_than_there_is_and_within_the_cap(
    seen: list[tuple[int, bool]], cap: int, data: st.DataObject
) -> None:
    estimator = LengthEstimator()
    for length, ended in seen:
        estimator.note(CHAT, length, ended=ended)
    produced = data.draw(st.integers(0, cap - 1))
    assert produced < estimator.total_tokens(CHAT, cap, produced) <= cap


@pytest.mark.parametrize("length", [1, 2, 3, 7, 100, 1023, 1024, 5000])
def test_a_class_that_always_says_the_same_is_reserved_enough_and_little_more(length: int) -> None:
    guess = taught(CHAT, [length] * 40).total_tokens(CHAT, 10**5)
    assert length <= guess <= 1.2 * length + 1
