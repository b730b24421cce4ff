"""Turns pairs of slots into as few copies as possible: neighbours on both sides become one run."""

from __future__ import annotations

import numpy as np

from dflash2.types import IntArray


def merge_runs(src: IntArray, dst: IntArray) -> list[tuple[int, int, int]]:
    """Merge positions that are neighbours on both sides.

    Args:
        src: int32 ``[n]``.
        dst: int32 ``[n]``; element i goes from ``src[i]`` to ``dst[i]``.

    Returns:
        ``(first src, first dst, length)`` per run, in the given order; lengths sum to n.
    """
    if not len(src):
        return []
    starts = run_starts(src, dst)
    lengths = np.diff(starts, append=len(src))
    return list(zip(src[starts].tolist(), dst[starts].tolist(), lengths.tolist(), strict=True))


def run_starts(*columns: IntArray) -> IntArray:
    """Indices at which a run of consecutive values (in every column at once) begins; the first is 0."""
    breaks = np.zeros(len(columns[0]) - 1, dtype=np.bool_)
    for column in columns:
        breaks |= np.diff(column) != 1
    return np.concatenate(([0], np.flatnonzero(breaks) + 1)).astype(np.int32)
