"""Padding of a packed batch to fixed sizes, for engines that compile or capture one program per size.

The reference engine does not pad: its batches stay packed.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from dflash2.types import BoolArray, IntArray


@dataclass(frozen=True, slots=True)
class PaddedBatch:
    """S sequences, of which some may be padding, each padded at its end to L tokens.

    Attributes:
        token_ids: int32 ``[S, L]``; ``pad_id`` where ``mask`` is False.
        positions: int32 ``[S, L]``; 0 where ``mask`` is False.
        mask: bool ``[S, L]``; True for real tokens.
        num_sequences: real ones; they come first.
    """

    token_ids: IntArray
    positions: IntArray
    mask: BoolArray
    num_sequences: int


def bucket_for(size: int, buckets: Sequence[int]) -> int:
    """The smallest bucket that holds ``size``.

    Args:
        size: tokens or sequences.
        buckets: ascending.

    Raises:
        ValueError: none of them does.
    """
    index = bisect_left(buckets, size)
    if index == len(buckets):
        raise ValueError(f"{size} fits no bucket; the largest is {buckets[-1] if buckets else 'missing'}")
    return buckets[index]


def pad_to_buckets(
    token_ids: IntArray,
    positions: IntArray,
    query_lens: IntArray,
    *,
    length_buckets: Sequence[int],
    batch_buckets: Sequence[int],
    pad_id: int = 0,
) -> PaddedBatch:
    """Spread a packed batch over a rectangle.

    Args:
        token_ids: int32 ``[T]``, sequence after sequence.
        positions: int32 ``[T]``.
        query_lens: int32 ``[S]``, tokens of each sequence.
        length_buckets: ascending lengths to pad to.
        batch_buckets: ascending numbers of sequences to pad to.
        pad_id: stands where there is no token.

    Raises:
        ValueError: the batch fits no bucket.
    """
    length = bucket_for(int(query_lens.max(initial=1)), length_buckets)
    rows = bucket_for(max(1, len(query_lens)), batch_buckets)
    mask = np.zeros((rows, length), np.bool_)
    mask[: len(query_lens)] = np.arange(length) < query_lens[:, None]
    padded_ids = np.full((rows, length), pad_id, np.int32)
    padded_positions = np.zeros((rows, length), np.int32)
    padded_ids[mask] = token_ids
    padded_positions[mask] = positions
    return PaddedBatch(padded_ids, padded_positions, mask, len(query_lens))
