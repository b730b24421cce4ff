"""Whether predictions earn to be followed: where they do worse than age alone, age alone decides, as with LRU."""

from __future__ import annotations

import logging

logger = logging.getLogger(__name__)

FADING = 0.995
"""Weight of the past evidence per wait that ends."""
LARGEST = 3.0
"""Of a single piece of evidence, in the logarithm."""
GIVE_UP_AT = -20.0
TRY_AGAIN_AFTER = 3000
"""Waits begun until the predictions are given another chance."""


class PredictionTrust:
    """Sums how much likelier the predictions had made what happened than age alone had, recent evidence most."""

    def __init__(self) -> None:
        self.holds = True
        self._evidence = 0.0
        self._lost_at = 0

    def note(self, log_ratio: float, num_begun: int) -> None:
        """A wait ended, ``exp(log_ratio)`` times as likely by the predictions as by age alone."""
        self._evidence = FADING * self._evidence + min(LARGEST, max(-LARGEST, log_ratio))
        if self._evidence < GIVE_UP_AT:
            self.holds, self._lost_at, self._evidence = False, num_begun, 0.0
            logger.info("predictions of when sessions come back do worse than their age alone: set aside for a while")

    def wait(self, num_begun: int) -> None:
        """Time passes; after a while the predictions are tried again."""
        if num_begun - self._lost_at >= TRY_AGAIN_AFTER:
            self.holds = True
