"""Counts failures by kind and logs each kind once a minute at most: a dying disk must not fill the log."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable


class FaultLog:
    """Thread-safe counters with a rate-limited log line.

    Args:
        logger: where the lines go.
        interval_s: least time between two lines of one kind.
        clock: monotonic seconds.
    """

    def __init__(
        self, logger: logging.Logger, interval_s: float = 60.0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._logger = logger
        self._interval_s = interval_s
        self._clock = clock
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()
        self._next_line: dict[str, float] = {}

    def report(self, kind: str, detail: str, count: int = 1) -> None:
        """Count ``count`` failures of ``kind``; log the first, and later one line a interval with the total."""
        now = self._clock()
        with self._lock:
            self._counts[kind] += count
            if now < self._next_line.get(kind, now):
                return
            self._next_line[kind] = now + self._interval_s
            total = self._counts[kind]
        self._logger.warning("%s: %s (%d so far)", kind, detail, total)

    @property
    def counts(self) -> dict[str, int]:
        """Failures by kind."""
        with self._lock:
            return dict(self._counts)
