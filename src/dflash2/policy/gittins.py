"""What a place in the cache is worth: the best ratio of expected hits to expected time of holding, over all horizons.

A block whose next use may come soon or never is worth holding for a while and no longer; the ratio finds the while.
It is the Gittins index of a wait that ends once.
"""

from __future__ import annotations

import numpy as np

from dflash2.policy.arrays import Floats

HORIZONS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32, 40, 48, 64, 96)
"""Bins looked ahead. With every other of them left out agents at 2 % lost 0.2 points of hits."""
PIECE = 64
"""Classes at a time: their arrays stay in the cache of a core."""
SHORTEST = 1e-30
"""Where nobody is left who waits, the time held is 0 and so are the hits."""


def hit_density(hazard: Floats, edges: Floats) -> Floats:
    """Expected hits per unit of time held, for somebody who has waited until the beginning of each bin.

    With C the probability of a hit by a time and T the expected time held until then, it is the steepest slope from a
    point of the curve (T, C) to a later one.

    Args:
        hazard: ``[classes, bins]``, probability that a wait that has reached a bin ends in it.
        edges: ``[bins + 1]``, ascending.

    Returns:
        float64 ``[classes, bins]``.
    """
    pieces = [_density(hazard[start : start + PIECE], edges) for start in range(0, len(hazard), PIECE)]
    return np.concatenate(pieces)


def _density(hazard: Floats, edges: Floats) -> Floats:
    num_classes, num_bins = hazard.shape
    survival = np.cumprod(1.0 - hazard, axis=1)
    reached = np.concatenate([np.ones((num_classes, 1)), survival[:, :-1]], axis=1)
    hits = np.zeros((num_classes, num_bins + 1))
    time = np.zeros((num_classes, num_bins + 1))
    np.cumsum(reached * hazard, axis=1, out=hits[:, 1:])
    np.cumsum(reached * (1.0 - 0.5 * hazard) * np.diff(edges), axis=1, out=time[:, 1:])
    best: Floats = (hits[:, -1:] - hits[:, :-1]) / np.maximum(time[:, -1:] - time[:, :-1], SHORTEST)
    slopes, waits = np.empty_like(best), np.empty_like(best)
    for ahead in HORIZONS:
        whole = max(0, num_bins + 1 - ahead)
        slope, waited = slopes[:, :whole], waits[:, :whole]
        np.subtract(hits[:, ahead:], hits[:, :whole], out=slope)
        np.subtract(time[:, ahead:], time[:, :whole], out=waited)
        np.maximum(waited, SHORTEST, out=waited)
        slope /= waited
        np.maximum(best[:, :whole], slope, out=best[:, :whole])
    return best
