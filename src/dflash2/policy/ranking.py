"""Choosing the smallest of many without sorting all."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from dflash2.types import IntArray


def smallest_first(ids: IntArray, score: npt.NDArray[np.float64], position: IntArray, count: int) -> IntArray:
    """Ids with the ``count`` smallest scores in ascending order.

    Equal scores: the block later in its sequence first, because a prefix without its head is worthless.

    Args:
        ids: int32 ``[n]``.
        score: float64 ``[n]``.
        position: int32 ``[n]``, index of each block in its sequence.
        count: how many; all if there are fewer.
    """
    if count <= 0:
        return ids[:0]
    if count < len(ids):
        boundary = np.partition(score, count - 1)[count - 1]
        inside = score <= boundary
        ids, score, position = ids[inside], score[inside], position[inside]
    return ids[np.lexsort((-position, score))][:count]
