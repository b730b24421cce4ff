"""What a place in the cache is worth: the best ratio of expected hits to expected time of holding, over all horizons.

A block whose next use may come soon or never is worth holding for a while and no longer; the ratio finds the while.
It is the Gittins index of a wait that ends once.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]


def hit_density(hazard: Floats, edges: Floats) -> Floats:
    """Expected hits per unit of time held, for somebody who has waited until the beginning of each bin.

    With C the probability of a hit by a time and T the expected time held until then, it is the steepest slope from a
    point of the curve (T, C) to any later one: the slope of the curve's upper hull.

    Args:
        hazard: ``[classes, bins]``, probability that a wait that has reached a bin ends in it.
        edges: ``[bins + 1]``, ascending.

    Returns:
        float64 ``[classes, bins]``.
    """
    num_classes, num_bins = hazard.shape
    survival = np.cumprod(1.0 - hazard, axis=1)
    reached = np.concatenate([np.ones((num_classes, 1)), survival[:, :-1]], axis=1)
    held = reached * (1.0 - 0.5 * hazard) * np.diff(edges)
    hits = np.zeros((num_classes, num_bins + 1))
    time = np.zeros((num_classes, num_bins + 1))
    np.cumsum(reached * hazard, axis=1, out=hits[:, 1:])
    np.cumsum(held, axis=1, out=time[:, 1:])
    slope = np.zeros((num_classes, num_bins + 1))
    after = np.full((num_classes, num_bins + 1), num_bins)  # end of the hull's edge that begins at a bin
    every = np.arange(num_classes)
    for begin in range(num_bins - 1, -1, -1):
        end = np.full(num_classes, begin + 1)
        best = _slope(hits, time, every, begin, end)
        climbing = (end < num_bins) & (slope[every, end] > best)
        while climbing.any():
            which = np.flatnonzero(climbing)
            end[which] = after[which, end[which]]
            best[which] = _slope(hits, time, which, begin, end[which])
            climbing[which] = (end[which] < num_bins) & (slope[which, end[which]] > best[which])
        slope[:, begin], after[:, begin] = best, end
    return slope[:, :num_bins]


def _slope(hits: Floats, time: Floats, rows: npt.NDArray[np.int64], begin: int, end: npt.NDArray[np.int64]) -> Floats:
    gained = hits[rows, end] - hits[rows, begin]
    slope: Floats = gained / np.maximum(time[rows, end] - time[rows, begin], 1e-30)
    return slope
