"""Padding keeps every token, in its place."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflash2.pipeline.buckets import bucket_for, pad_to_buckets


def test_the_smallest_bucket_that_holds_it() -> None:
    assert [bucket_for(size, [4, 16, 64]) for size in (1, 4, 5, 16, 64)] == [4, 4, 16, 16, 64]
    with pytest.raises(ValueError, match="65 fits no bucket; the largest is 64"):
        bucket_for(65, [4, 16, 64])


def test_a_batch_in_a_rectangle() -> None:
    packed = np.array([7, 8, 9, 5], np.int32)
    positions = np.array([0, 1, 2, 40], np.int32)
    lens = np.array([3, 1], np.int32)
    padded = pad_to_buckets(packed, positions, lens, length_buckets=[4, 8], batch_buckets=[1, 4], pad_id=99)
    assert padded.token_ids.tolist() == [[7, 8, 9, 99], [5, 99, 99, 99], [99] * 4, [99] * 4]
    assert padded.positions[:2].tolist() == [[0, 1, 2, 0], [40, 0, 0, 0]]
    assert padded.num_sequences == 2


@given(st.lists(st.integers(1, 20), min_size=1, max_size=12))
def test_nothing_is_lost_or_moved(lens: list[int]) -> None:
    packed = np.arange(sum(lens), dtype=np.int32)
    padded = pad_to_buckets(
        packed, packed, np.array(lens, np.int32), length_buckets=[1, 8, 32], batch_buckets=[2, 16], pad_id=-7
    )
    assert padded.token_ids[padded.mask].tolist() == padded.positions[padded.mask].tolist() == packed.tolist()
    assert padded.mask.sum(axis=1)[: len(lens)].tolist() == lens
    assert (padded.token_ids[~padded.mask] == -7).all() and not padded.mask[len(lens) :].any()
