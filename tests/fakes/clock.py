"""Time that moves when it is told to."""

from __future__ import annotations


class ManualClock:
    """Seconds; call it for the time, as ``time.monotonic``."""

    def __init__(self, start_s: float = 1_000.0) -> None:
        self.now = start_s

    def __call__(self) -> float:
        return self.now

    def advance(self, seconds: float) -> None:
        self.now += seconds
