"""The horizon of heat: the time in which HBM turns over once, estimated online."""

from __future__ import annotations

import math

SHORTEST_S = 1.0
LONGEST_S = 3600.0
SMOOTHING_S = 10.0
"""Time constant of the average pace."""


class TurnoverHorizon:
    """HBM slots divided by the smoothed rate at which slots are taken.

    Args:
        num_slots: slots of the HBM pool.
        initial_s: horizon until the first slots are taken.
    """

    def __init__(self, num_slots: int, initial_s: float = 60.0) -> None:
        self._num_slots = num_slots
        self._rate = num_slots / initial_s
        self._last: float | None = None

    def note(self, num_taken: int, now: float) -> None:
        """``num_taken`` slots were taken at time ``now``."""
        gap = 0.0 if self._last is None else max(0.0, now - self._last)
        self._last = now
        self._rate = self._rate * math.exp(-gap / SMOOTHING_S) + num_taken / SMOOTHING_S

    def seconds(self, now: float) -> float:
        """Between ``SHORTEST_S`` and ``LONGEST_S``."""
        gap = 0.0 if self._last is None else max(0.0, now - self._last)
        rate = self._rate * math.exp(-gap / SMOOTHING_S)
        return min(LONGEST_S, max(SHORTEST_S, self._num_slots / max(rate, 1e-9)))
