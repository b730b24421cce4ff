"""How soon blocks are used again that no single session decides about, by plain time since they were used last."""

from __future__ import annotations

import math

import numpy as np

from dflash2.policy.arrays import Floats, Ints
from dflash2.policy.gaps import LOW_PLAIN, SHORTEST_S
from dflash2.policy.hazard import (
    LARGEST_HAZARD,
    NUM_BINS,
    PRIOR_WEIGHT,
    SHRINKAGE,
    HazardTables,
    bin_at,
    bin_of,
    tables_from,
)

BLOCKS_PER_EVENT = 20
"""Blocks are used in groups: so many count as one observation."""


class TouchModel:
    """Hazard of the next use, by class; sums over everything seen.

    Args:
        num_classes: row ``class + 1`` of the tables is a class, row 0 all together.
        prior: ``[NUM_BINS]``, hazard assumed before anything is seen.
    """

    def __init__(self, num_classes: int, prior: Floats) -> None:
        self.low = LOW_PLAIN
        self._prior = prior
        self._ends = np.zeros((num_classes + 1, NUM_BINS))
        self.tables: HazardTables = tables_from(np.tile(prior, (num_classes + 1, 1)), self.low, {})

    def note_use(self, number: int, age_s: float, num_blocks: int) -> None:
        """Blocks of class ``number`` were used again after ``age_s``."""
        at = bin_at(math.log(max(age_s, SHORTEST_S)), self.low)
        self._ends[0, at] += num_blocks / BLOCKS_PER_EVENT
        self._ends[number + 1, at] += num_blocks / BLOCKS_PER_EVENT

    def state(self) -> list[list[float]]:
        """Uses seen, by class and bin."""
        rows: list[list[float]] = np.round(self._ends, 2).tolist()
        return rows

    def restore(self, rows: list[list[float]]) -> None:
        """Take over what ``state`` returned.

        Raises:
            ValueError: the rows are of another shape.
        """
        ends = np.array(rows, np.float64)
        if ends.shape != self._ends.shape or not np.isfinite(ends).all():
            raise ValueError("another number of classes or bins")
        self._ends = ends

    def refit(self, numbers: Ints, age_s: Floats, num_blocks: Ints) -> None:
        """Learn anew, given the class, the age and the blocks of each group that waits."""
        size = self._ends.size
        cell = (numbers + 1) * NUM_BINS + bin_of(np.log(np.maximum(age_s, SHORTEST_S)), self.low)
        waiting = np.bincount(cell, num_blocks / BLOCKS_PER_EVENT, size).reshape(self._ends.shape)
        waiting[0] = waiting.sum(axis=0)
        at_risk = np.cumsum((self._ends + waiting)[:, ::-1], axis=1)[:, ::-1] - 0.5 * waiting
        prior = self._prior
        root = prior * (self._ends[0] + PRIOR_WEIGHT) / (at_risk[0] * prior + PRIOR_WEIGHT)
        hazard = root * (self._ends + SHRINKAGE) / (at_risk * root + SHRINKAGE)
        hazard[0] = root
        self.tables = tables_from(np.minimum(hazard, LARGEST_HAZARD), self.low, {})
