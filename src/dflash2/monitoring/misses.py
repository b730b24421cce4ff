"""Which blocks were not in HBM when they were needed: the per-block statistics behind the hit rate (R-3.6)."""

from __future__ import annotations

from heapq import nlargest

from dflash2.table.page_table import PageTable
from dflash2.types import IntArray

REMEMBERED = 65_536
"""Blocks remembered at most; the one that missed first is forgotten first."""


class BlockMisses:
    """Counts misses of each block for as long as its row holds the same block."""

    def __init__(self, table: PageTable) -> None:
        self._table = table
        self._counts: dict[int, tuple[int, int]] = {}

    def note(self, ids: IntArray) -> None:
        """These blocks were needed in HBM and were not there."""
        for block_id in ids.tolist():
            self._counts[block_id] = (self._life(block_id), self.of(block_id) + 1)
            if len(self._counts) > REMEMBERED:
                del self._counts[next(iter(self._counts))]

    def of(self, block_id: int) -> int:
        """Misses of a block since it was computed."""
        life, count = self._counts.get(block_id, (None, 0))
        return count if life == self._life(block_id) else 0

    def worst(self, count: int) -> list[tuple[int, int]]:
        """(block_id, misses) of the blocks that missed most, the worst first."""
        every = ((block_id, self.of(block_id)) for block_id in self._counts)
        return nlargest(count, (pair for pair in every if pair[1]), key=lambda pair: pair[1])

    def _life(self, block_id: int) -> int:
        return int(self._table.generation[block_id])
