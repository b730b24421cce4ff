"""Blocks that stay where they are, because somebody is about to load them."""

from __future__ import annotations

import numpy as np

from dflash2.table.page_table import PageTable
from dflash2.types import IntArray


class Holds:
    """However many want a block, the table is told once: its counts of copies are small.

    Args:
        table: a held block is busy there, so that none of its slots is given up.
    """

    def __init__(self, table: PageTable) -> None:
        self._table = table
        self._num_wanted = np.zeros(len(table.busy), np.int32)

    def hold(self, ids: IntArray) -> None:
        """Distinct blocks stay on the tiers they are on until they are let go as often as they were held."""
        self._num_wanted[ids] += 1
        self._table.mark_busy(ids[self._num_wanted[ids] == 1])

    def let_go(self, ids: IntArray) -> None:
        """One hold on each of these blocks is over; two for one that appears twice."""
        np.subtract.at(self._num_wanted, ids, 1)
        self._table.unmark_busy(ids[self._num_wanted[ids] == 0])
