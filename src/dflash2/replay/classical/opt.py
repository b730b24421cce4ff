"""The optimum that knows the future: Belady's, where a block may also be passed over. For reports only."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from dflash2.types import IntArray

NEVER = np.iinfo(np.int64).max


def next_uses(requests: Sequence[IntArray]) -> npt.NDArray[np.int64]:
    """int64 ``[references]``: for each reference, in order, the index of the next one to the same block, or NEVER."""
    every = np.concatenate([np.empty(0, np.int32), *requests])
    order = np.argsort(every, kind="stable")
    following = np.full(len(every), NEVER, np.int64)
    same = every[order[1:]] == every[order[:-1]]
    following[order[:-1][same]] = order[1:][same]
    return following


def optimal_hits(requests: Sequence[IntArray], capacity: int) -> npt.NDArray[np.int64]:
    """int64 ``[requests]``: leading blocks of each request that the optimum holds when it arrives.

    Args:
        requests: int32 ``[n]`` each, distinct blocks, numbered from 0.
        capacity: blocks held.
    """
    following = next_uses(requests)
    num_blocks = 1 + max((int(blocks.max()) for blocks in requests if len(blocks)), default=-1)
    next_use = np.full(num_blocks, NEVER, np.int64)
    """Of blocks that are held; NEVER for all others."""
    hits = np.zeros(len(requests), np.int64)
    start = 0
    for number, blocks in enumerate(requests):
        absent = np.flatnonzero(next_use[blocks] == NEVER)
        hits[number] = absent[0] if len(absent) else len(blocks)
        next_use[blocks] = following[start : start + len(blocks)]
        start += len(blocks)
        held = np.flatnonzero(next_use != NEVER)
        surplus = len(held) - capacity
        if surplus > 0:
            latest = np.argpartition(next_use[held], len(held) - surplus)[-surplus:]
            next_use[held[latest]] = NEVER
    return hits
