"""Notices demoted blocks that come back: the evidence for the adaptive guard."""

from __future__ import annotations

from dflash2.monitoring.misses import BlockMisses
from dflash2.table.page_table import PageTable
from dflash2.types import IntArray

REMEMBERED = 65_536
"""Demotions remembered at most; the oldest is forgotten first."""


class RegretWatch:
    """Counts blocks demoted ahead of need and those of them that were needed again within the horizon."""

    def __init__(self, table: PageTable) -> None:
        self._table = table
        self._demoted_at: dict[int, tuple[int, float]] = {}
        self.horizon_s = 60.0
        self.misses = BlockMisses(table)
        """Each miss by its block."""
        self.num_demoted = 0
        """Blocks demoted ahead of need since the start."""
        self.num_regretted = 0
        """Of these, needed again within the horizon."""
        self._taken = (0, 0)

    def note_demoted(self, ids: IntArray, now: float) -> None:
        for block_id in ids.tolist():
            self._demoted_at[block_id] = (int(self._table.generation[block_id]), now)
            if len(self._demoted_at) > REMEMBERED:
                del self._demoted_at[next(iter(self._demoted_at))]
        self.num_demoted += len(ids)

    def note_needed(self, ids: IntArray, now: float) -> None:
        """These blocks are needed in HBM and are not there."""
        self.misses.note(ids)
        for block_id in ids.tolist():
            generation, at = self._demoted_at.pop(block_id, (None, 0.0))
            if generation == int(self._table.generation[block_id]) and now - at <= self.horizon_s:
                self.num_regretted += 1

    def take(self) -> tuple[int, int]:
        """(demoted, regretted) since the last call."""
        before, self._taken = self._taken, (self.num_demoted, self.num_regretted)
        return self._taken[0] - before[0], self._taken[1] - before[1]
