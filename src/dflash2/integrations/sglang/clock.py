"""Time as the turnover of the device pool: alike on all ranks, because it follows from what was computed."""

from __future__ import annotations

TURNOVER_S = 100.0
"""One "second" is a hundredth of the device pool: the policy's horizon, one turnover, is then about 100 s."""


class TurnoverClock:
    """Stands still while nothing is computed: then nothing needs room either, and nothing should cool.

    Args:
        num_slots: blocks that the device pool holds.
    """

    def __init__(self, num_slots: int) -> None:
        self._per_block = TURNOVER_S / max(1, num_slots)
        self._now = 0.0

    def __call__(self) -> float:
        return self._now

    def advance(self, num_blocks: int) -> None:
        """``num_blocks`` blocks of the device pool were filled."""
        self._now += num_blocks * self._per_block
