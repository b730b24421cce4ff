"""The adaptive guard: lowers the effective threshold while demoted blocks keep coming back (R-3.5)."""

from __future__ import annotations

import logging

logger = logging.getLogger(__name__)

MIN_SAMPLE = 32
"""Demoted blocks to have seen before a verdict."""
REGRET_HIGH = 0.3
REGRET_LOW = 0.1
STEP = 0.8
"""Factor by which the threshold moves at a time."""
FLOOR = 0.1


class AdaptiveThreshold:
    """Watches regret: the share of blocks demoted ahead of need that came back within the horizon.

    Args:
        configured: the user's ``cold_threshold``; the upper bound of the effective one.
    """

    def __init__(self, configured: float) -> None:
        self.configured = configured
        self.effective = configured
        self._demoted = 0
        self._regretted = 0

    def configure(self, configured: float) -> None:
        """The user's threshold, perhaps another one than before: the effective one follows in proportion."""
        if configured != self.configured:
            share = self.effective / self.configured if self.configured else 1.0
            self.effective = max(min(FLOOR, configured), share * configured)
            self.configured = configured

    def note(self, num_demoted: int, num_regretted: int) -> None:
        """Evidence since the last call: blocks demoted ahead of need, and of those demoted earlier, come back."""
        self._demoted += num_demoted
        self._regretted += num_regretted

    def update(self) -> float:
        """Judge what was seen since the last verdict and return the effective threshold."""
        if self._demoted < MIN_SAMPLE:
            return self.effective
        regret = self._regretted / self._demoted
        self._demoted = self._regretted = 0
        before = self.effective
        floor = min(FLOOR, self.configured)
        if regret > REGRET_HIGH:
            self.effective = max(floor, self.effective * STEP)
        elif regret < REGRET_LOW:
            self.effective = min(self.configured, self.effective / STEP)
        if self.effective != before:
            logger.info(
                "cold_threshold moved by the adaptive guard: %.2f -> %.2f (configured %.2f), %.0f %% of the blocks "
                "demoted ahead of need came back soon",
                before,
                self.effective,
                self.configured,
                100 * regret,
            )
        return self.effective
