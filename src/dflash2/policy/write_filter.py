"""What is worth a write to NVMe: the least likely blocks are forgotten instead, as many as reuse can spare."""

from __future__ import annotations

import math

import numpy as np

from dflash2.policy.arrays import Floats
from dflash2.types import BoolArray, FloatArray

LOSS = 0.01
"""Of the blocks reused, the share that may be lost with those forgotten."""
INITIAL = 0.0
"""Chance from which on a block is written before enough were judged: nothing is known of what reuse can spare, and the
first chances are guesses that depend on the unit of time."""
FEWEST = 256
"""Blocks judged before the threshold moves."""
MEMORY = 50_000
"""Blocks judged until what was seen before them weighs a third."""
NUM_BINS = 64
LOWEST_LOG = -7.0
"""Chances below a thousandth are alike."""


class WriteFilter:
    """Keeps the threshold where the expected loss is ``LOSS``; where more is lost than was expected, lower.

    A fixed threshold is a cliff: what leaves DRAM has waited for about as long as all that leaves with it, so most
    chances lie close together, and where depends on the traffic.
    """

    def __init__(self) -> None:
        self.threshold = INITIAL
        self._num_judged = 0
        self._uses: Floats = np.zeros(NUM_BINS)
        """Expected of the blocks judged, by the logarithm of their chance. This and what follows fades."""
        self._uses_given_up = 0.0
        """Expected of those forgotten."""
        self._reused = 0.0
        self._lost = 0.0

    def note_return(self, found: float, lost: float) -> None:
        """A session is back: what its last request's blocks cost that are still there, on any tier, and that are not.

        Not counted before something was judged: what was lost then was not lost here.
        """
        if self._num_judged:
            self._reused += found
            self._lost += lost

    def judge(self, chances: FloatArray) -> BoolArray:
        """Blocks that nobody holds leave the last tier that has them.

        Args:
            chances: float32 ``[n]``, of a use in the long run, times what it costs to compute the block again.

        Returns:
            bool ``[n]``: to be forgotten.
        """
        forgotten: BoolArray = chances < self.threshold
        fading = MEMORY / (MEMORY + len(chances))
        part = 1.0 - np.log(np.maximum(chances, 1e-9)) / LOWEST_LOG
        at = np.clip(part * NUM_BINS, 0, NUM_BINS - 1).astype(np.int64)
        self._uses = fading * self._uses + np.bincount(at, chances, NUM_BINS)
        self._uses_given_up = fading * self._uses_given_up + float(chances[forgotten].sum())
        self._reused *= fading
        self._lost *= fading
        self._num_judged += len(chances)
        if self._num_judged >= FEWEST:
            below = int(np.searchsorted(np.cumsum(self._uses), self._spare()))
            num_bins = min(below, int(self._uses.nonzero()[0].max(initial=0)))  # of higher ones nothing is known
            self.threshold = math.exp(LOWEST_LOG * (1.0 - num_bins / NUM_BINS))
        return forgotten

    def _spare(self) -> float:
        """Expected uses that may be given up."""
        allowed = LOSS * self._reused
        if self._lost <= allowed or self._lost <= self._uses_given_up:
            return allowed
        return allowed * self._uses_given_up / self._lost
