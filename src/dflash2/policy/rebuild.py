"""What a lost block costs to compute again, by its place in the prompt."""

from __future__ import annotations

import math

from dflash2.types import FloatArray, IntArray


class RebuildCost:
    """Relative to a prompt's first block: attention looks at all that comes before, the rest is the same everywhere.

    Blocks are equally large, so this is also the cost per byte.

    Args:
        doubles_at: position, in blocks, of a block that costs twice as much; infinite where all cost the same.
    """

    def __init__(self, doubles_at: float = math.inf) -> None:
        self._doubles_at = doubles_at

    def of(self, positions: IntArray) -> FloatArray:
        """float32 ``[n]``: of blocks at these positions."""
        return (1.0 + positions / self._doubles_at).astype("float32")

    def total(self, first: int, end: int) -> float:
        """Of the blocks from position ``first`` up to ``end``, that one not included."""
        return (end - first) + 0.5 * (end - first) * (first + end - 1) / self._doubles_at
