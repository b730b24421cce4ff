"""The adaptive guard: lowers the effective threshold while demoting ahead of need does not pay (R-3.5)."""

from __future__ import annotations

import logging
from dataclasses import dataclass

logger = logging.getLogger(__name__)

MIN_SAMPLE = 32
"""Demoted blocks to have seen before a verdict."""
REGRET_HIGH = 0.3
REGRET_LOW = 0.1
EXCHANGE_HIGH = 0.5
"""Blocks that somebody had to wait for, per block demoted: from here on room is made for what was sent away."""
STEP = 0.8
"""Factor by which the threshold moves at a time."""
FLOOR = 0.1


@dataclass(frozen=True, slots=True)
class Evidence:
    """What happened in HBM in some time.

    Attributes:
        demoted: blocks demoted ahead of need.
        regretted: blocks demoted so, then or before, that were needed again within the horizon.
        used: uses of blocks that exist on some tier.
        missed: of these, not in HBM when needed.
    """

    demoted: int = 0
    regretted: int = 0
    used: int = 0
    missed: int = 0

    def __add__(self, other: Evidence) -> Evidence:
        return Evidence(
            self.demoted + other.demoted,
            self.regretted + other.regretted,
            self.used + other.used,
            self.missed + other.missed,
        )

    @property
    def hit_rate(self) -> float:
        return 1.0 - self.missed / self.used if self.used else 1.0


class AdaptiveThreshold:
    """Watches two things: regret, and traffic that brings no hits.

    Regret is the share of blocks demoted ahead of need that came back within the horizon. Traffic brings no hits when
    blocks come in as fast as they are demoted and the hit rate is not above what it was at the last verdict.

    Args:
        configured: the user's ``cold_threshold``; the upper bound of the effective one.
    """

    def __init__(self, configured: float) -> None:
        self.configured = configured
        self.effective = configured
        self._seen = Evidence()
        self._last_hit_rate = 0.0

    def configure(self, configured: float) -> None:
        """The user's threshold, perhaps another one than before: the effective one follows in proportion."""
        if configured != self.configured:
            share = self.effective / self.configured if self.configured else 1.0
            self.effective = max(min(FLOOR, configured), share * configured)
            self.configured = configured

    def note(self, evidence: Evidence) -> None:
        """What was seen since the last call."""
        self._seen += evidence

    def update(self) -> float:
        """Judge what was seen since the last verdict and return the effective threshold."""
        seen = self._seen
        if seen.demoted < MIN_SAMPLE:
            return self.effective
        self._seen = Evidence()
        regret, exchange = seen.regretted / seen.demoted, seen.missed / seen.demoted
        gains = seen.hit_rate > self._last_hit_rate
        self._last_hit_rate = seen.hit_rate
        before = self.effective
        if regret > REGRET_HIGH or (exchange > EXCHANGE_HIGH and not gains):
            self.effective = max(min(FLOOR, self.configured), before * STEP)
        elif regret < REGRET_LOW and exchange <= EXCHANGE_HIGH:
            self.effective = min(self.configured, before / STEP)
        if self.effective != before:
            logger.info(
                "cold_threshold moved by the adaptive guard: %.2f -> %.2f (configured %.2f), %.0f %% of the blocks "
                "demoted ahead of need came back soon, %.1f had to be loaded for each of them, hit rate %.1f %%",
                *(before, self.effective, self.configured),
                *(100 * regret, exchange, 100 * seen.hit_rate),
            )
        return self.effective
