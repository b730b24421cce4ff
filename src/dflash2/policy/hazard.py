"""Hazard tables: how likely a wait ends in the next moment, given how long it has lasted.

Time is divided into bins of equal width in the logarithm. Waits are sorted into a tree of ever finer classes; where a
class has seen little, its table is that of its parent. Waits that have not ended count as far as they have come.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from dflash2.policy.arrays import Floats, Ints
from dflash2.policy.gittins import hit_density

NUM_BINS = 96
BIN_WIDTH = 0.15
"""In the natural logarithm of time: each bin is a sixth longer than the one before, 96 of them span 1 : 1,800,000."""
SHRINKAGE = 1.5
"""Ends of waits by which a class must outweigh its parent."""
PRIOR_WEIGHT = 2.0
"""The same for the first class of all and what is assumed before anything was seen."""
SMOOTHING = 3
"""Passes of averaging neighbouring bins."""
LARGEST_HAZARD = 0.999
PIECE = 32
"""Rows multiplied at a time."""
RADIX = 64
"""Classes of one level, the unknown one included."""
FEWEST = 2
"""Waits that a class has a table of its own for: a single one hardly tells anything, and many classes have no more."""


def bin_of(log_time: Floats, low: float) -> Ints:
    """int64 ``[n]``: bin of each ``log_time``; ``low`` is where the first bin begins."""
    bins: Ints = np.empty(log_time.shape, np.int64)
    np.clip((log_time - low) / BIN_WIDTH, 0.0, NUM_BINS - 1, out=bins, casting="unsafe")
    return bins


def bin_at(log_time: float, low: float) -> int:
    """``bin_of`` for a single time, which it takes a tenth of the time for."""
    return min(NUM_BINS - 1, max(0, int((log_time - low) / BIN_WIDTH)))


def edges(low: float) -> Floats:
    """float64 ``[NUM_BINS + 1]``: where the bins begin and end, in time; the first begins at 0."""
    at: Floats = np.exp(low + BIN_WIDTH * np.arange(NUM_BINS + 1))
    at[0] = 0.0
    return at


def assumed_hazard(low: float, share: float, median: float, sigma: float) -> Floats:
    """Hazard ``[NUM_BINS]`` of waits of which a share ends, after a log-normal time, and the others never do."""
    at = edges(low)
    deviations = [(math.log(max(time, 1e-300) / median)) / (sigma * math.sqrt(2.0)) for time in at.tolist()]
    ended = share * 0.5 * np.array([math.erfc(-deviation) for deviation in deviations])
    hazard: Floats = np.maximum(np.diff(ended) / (1.0 - ended[:-1]), 1e-5)
    return hazard


@dataclass(frozen=True, slots=True)
class HazardTables:
    """Tables of all classes of one tree; row 0 is the root.

    Attributes:
        rows: row by path; the numbers of a path are digits of base ``RADIX`` behind a leading 1.
        index: float32 ``[rows, NUM_BINS]``, best ratio of expected ends to expected waiting from a bin on.
        log_survival: float32 ``[rows, NUM_BINS + 1]``, log probability that a wait reaches each edge.
    """

    rows: dict[int, int]
    index: npt.NDArray[np.float32]
    log_survival: npt.NDArray[np.float32]

    def chance(self, row: int, at: int) -> float:
        """Probability that a wait of a class ends in bin ``at``, never 0."""
        reached, passed = self.log_survival.item(row, at), self.log_survival.item(row, at + 1)
        return max(1e-6, math.exp(reached) - math.exp(passed))

    def row_of(self, path: tuple[int, ...]) -> int:
        """Row of the finest known class on a path."""
        packed, row = 1, 0
        for part in path:
            packed = packed * RADIX + part
            found = self.rows.get(packed)
            if found is None:
                return row
            row = found
        return row


def build_tables(
    paths: Ints, bins: Ints, ended: npt.NDArray[np.bool_], prior: Floats, low: float, max_rows: int
) -> tuple[HazardTables, Ints]:
    """Tables from what was seen.

    Args:
        paths: ``[n, levels]``, class of each wait at each level below the root, from coarse to fine.
        bins: ``[n]``, where each wait has ended or has come to.
        ended: ``[n]``; the others are still waiting.
        prior: ``[NUM_BINS]``, hazard assumed before anything is seen.
        low: where the first bin begins, in the logarithm.
        max_rows: classes at most; finer levels are left out where they would be more.

    Returns:
        The tables and, int64 ``[n]``, the row of each wait.
    """
    leaf = np.zeros(len(bins), np.int64)
    inside = np.arange(len(bins))
    node = leaf
    packed = np.ones(1, np.int64)
    rows: dict[int, int] = {}
    counts = [_counts(node, bins, ended, 1)]
    parents_of: list[Ints] = []
    total = 1
    for level in range(paths.shape[1]):
        cell = node * RADIX + paths[inside, level]
        known = np.bincount(cell, minlength=len(packed) * RADIX) >= FEWEST
        found = np.flatnonzero(known)
        if not len(found) or total + len(found) > max_rows:
            break
        stays = known[cell]
        inside = inside[stays]
        node = (np.cumsum(known) - 1)[cell[stays]]
        parents, parts = np.divmod(found, RADIX)
        packed = packed[parents] * RADIX + parts
        counts.append(_counts(node, bins[inside], ended[inside], len(found)))
        parents_of.append(parents)
        rows.update(zip(packed.tolist(), range(total, total + len(found)), strict=True))
        leaf[inside] = node + total
        total += len(found)
    return tables_from(_hazards(np.concatenate(counts, axis=1), parents_of, prior), low, rows), leaf


def tables_from(hazard: Floats, low: float, rows: dict[int, int]) -> HazardTables:
    """Tables for hazards ``[rows, NUM_BINS]``."""
    log_survival = np.zeros((len(hazard), NUM_BINS + 1), np.float32)
    np.cumsum(np.log1p(-hazard), axis=1, out=log_survival[:, 1:])
    return HazardTables(rows, hit_density(hazard, edges(low)).astype(np.float32), log_survival)


def _counts(node: Ints, bins: Ints, ended: npt.NDArray[np.bool_], num_nodes: int) -> Ints:
    """Waits that go on and waits that have ended, ``[2, nodes, NUM_BINS]``."""
    cell = node * NUM_BINS + bins
    cell[ended] += num_nodes * NUM_BINS
    return np.bincount(cell, minlength=2 * num_nodes * NUM_BINS).reshape(2, num_nodes, NUM_BINS)


def _hazards(counts: Ints, parents_of: list[Ints], prior: Floats) -> Floats:
    """Hazards of all nodes, ``[nodes, NUM_BINS]``, each shrunk towards its parent's.

    Args:
        counts: as from ``_counts``, the root first, then level by level.
        parents_of: by level below the root, the place of each node's parent in the level above.
        prior: of the root.
    """
    waiting, ended = counts.astype(np.float64)
    ends = _times(ended, _SMOOTHER)
    at_risk = _times(ended, _RISK_OF_ENDED) + _times(waiting, _RISK_OF_WAITING)
    hazards = [_shrunk(ends[:1], at_risk[:1], prior, PRIOR_WEIGHT)]
    first = 1
    for parents in parents_of:
        level = slice(first, first + len(parents))
        hazards.append(_shrunk(ends[level], at_risk[level], hazards[-1][parents], SHRINKAGE))
        first += len(parents)
    return np.concatenate(hazards)


def _smoother() -> Floats:
    """``[NUM_BINS, NUM_BINS]``: counts times it are smooth.

    Each bin becomes a quarter of each neighbour and half of itself, several times; a bin at an end is its own.
    """
    once = 0.5 * np.eye(NUM_BINS) + 0.25 * (np.eye(NUM_BINS, k=1) + np.eye(NUM_BINS, k=-1))
    once[0, 0] = once[-1, -1] = 0.75
    return np.linalg.matrix_power(once, SMOOTHING)


_SMOOTHER = _smoother()
_RISK_OF_ENDED = np.tri(NUM_BINS) @ _SMOOTHER
"""A wait was at risk in the bin it ended in and all before;"""
_RISK_OF_WAITING = (np.tri(NUM_BINS) - 0.5 * np.eye(NUM_BINS)) @ _SMOOTHER
"""one that goes on, half in the bin it is in."""


def _times(counts: Floats, matrix: Floats) -> Floats:
    """In pieces so small that BLAS does not call other threads, which would wait for busy cores."""
    return np.concatenate([counts[start : start + PIECE] @ matrix for start in range(0, len(counts), PIECE)])


def _shrunk(ends: Floats, at_risk: Floats, parent: Floats, weight: float) -> Floats:
    """The parent's hazard times observed over expected ends, both raised by ``weight``."""
    hazard: Floats = np.minimum(LARGEST_HAZARD, parent * (ends + weight) / (at_risk * parent + weight))
    return hazard
