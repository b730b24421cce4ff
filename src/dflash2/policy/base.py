"""What the cache manager asks of a placement policy."""

from __future__ import annotations

from typing import Protocol

from dflash2.table.page_table import PageTable
from dflash2.types import BoolArray, IntArray


class PlacementPolicy(Protocol):
    """Judges blocks; never moves them. A new policy is one file with this class in it and one line in ``build``.

    Times are seconds of the clock that the caller carries through a step, so all ranks judge alike.
    """

    name: str
    cold_threshold: float
    """Blocks below this heat may be demoted ahead of need; may be changed while running."""

    def horizon_s(self, now: float) -> float:
        """The time in which HBM turns over once."""
        ...

    def on_use(self, table: PageTable, ids: IntArray, now: float) -> None:
        """A sequence that becomes resident uses these distinct blocks."""
        ...

    def on_allocate(self, table: PageTable, ids: IntArray, now: float) -> None:
        """New blocks took HBM slots: the pace at which HBM turns over."""
        ...

    def refresh(self, table: PageTable, now: float) -> None:
        """Write ``table.heat`` in [0, 1] for all rows in use. Never on the path of a step."""
        ...

    def is_cold(self, table: PageTable, ids: IntArray, now: float) -> BoolArray:
        """bool ``[n]``: may be demoted ahead of need."""
        ...

    def order(self, table: PageTable, ids: IntArray, count: int, now: float) -> IntArray:
        """The ``count`` least valuable of ``ids``, the least valuable first; a block never before its followers."""
        ...
