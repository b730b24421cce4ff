"""What is forgotten instead of written: as much as the loss allows, the least likely first."""

from __future__ import annotations

import numpy as np
import pytest

from dflash2.policy.write_filter import FEWEST, INITIAL, LOSS, WriteFilter


def serve(writes: WriteFilter, chances: list[float], *, reused: int, lost: int = 0, rounds: int = 400) -> float:
    """Expected uses given up per block reused, over the last half of the rounds."""
    batch = np.array(chances, np.float32)
    given_up = 0.0
    for number in range(rounds):
        writes.note_return(reused, lost)
        forgotten = writes.judge(batch)
        if number >= rounds // 2:
            given_up += float(batch[forgotten].sum())
    return given_up / max(1, reused * (rounds - rounds // 2))


def test_the_least_likely_are_forgotten_until_the_loss_is_reached() -> None:
    writes = WriteFilter()
    chances = [0.01 * number for number in range(1, 41)]
    assert serve(writes, chances, reused=50) == pytest.approx(LOSS, rel=0.4)
    assert writes.judge(np.array([0.01, 0.35], np.float32)).tolist() == [True, False]


def test_before_enough_were_judged_nothing_is_forgotten() -> None:
    writes = WriteFilter()
    writes.note_return(10_000, 0)
    assert not writes.judge(np.full(FEWEST - 1, 0.001, np.float32)).any()
    assert not writes.judge(np.full(1, 0.001, np.float32)).any()


def test_where_reuse_is_plenty_more_is_forgotten() -> None:
    little, plenty = WriteFilter(), WriteFilter()
    chances = [0.01 * number for number in range(1, 41)]
    serve(little, chances, reused=20)
    serve(plenty, chances, reused=200)
    assert little.threshold < plenty.threshold


def test_what_is_likelier_than_anything_judged_is_written() -> None:
    writes = WriteFilter()
    serve(writes, [0.002] * 300, reused=5000, rounds=2)
    assert not writes.judge(np.full(2000, 0.95, np.float32)).any()


def test_without_reuse_everything_is_written() -> None:
    writes = WriteFilter()
    serve(writes, [0.01, 0.2, 0.3], reused=0)
    assert not writes.judge(np.array([0.001, 0.01, 0.9], np.float32)).any()


def test_what_lies_close_together_is_not_forgotten_whole() -> None:
    """A fixed threshold would forget all of it or nothing."""
    writes = WriteFilter()
    chances = [0.17 + 0.0005 * number for number in range(40)]
    assert 0 <= serve(writes, chances, reused=100) <= 1.5 * LOSS


def test_where_more_is_lost_than_was_expected_less_is_forgotten() -> None:
    true, false = WriteFilter(), WriteFilter()
    chances = [0.01 * number for number in range(1, 41)]
    serve(true, chances, reused=50)
    serve(false, chances, reused=50, lost=5)
    assert false.threshold < 0.7 * true.threshold


def test_before_enough_were_judged_the_threshold_stays() -> None:
    writes = WriteFilter()
    writes.judge(np.full(FEWEST - 1, 0.5, np.float32))
    assert writes.threshold == INITIAL
    writes.judge(np.full(1, 0.5, np.float32))
    assert writes.threshold != INITIAL
