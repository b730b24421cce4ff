"""Says what is wrong before somebody finds out: each warning once, and again only if it still holds an hour later."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from typing import Any

from dflash2.config import Config
from dflash2.monitoring.pitfalls import RULES, Seen, Worst

logger = logging.getLogger(__name__)

INTERVAL_S = 5.0
REPEAT_S = 3600.0


class Advisor:
    """Looks at the statistics every ``INTERVAL_S`` seconds.

    Args:
        clock: monotonic seconds.
        wall: seconds since 1970, for the page.
    """

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._clock = clock
        self._wall = wall
        self._next = clock()
        self._said_at: dict[str, float] = {}
        self._seen = Seen({}, Config())
        self._given: dict[str, dict[str, Any]] = {}

    @property
    def given(self) -> list[dict[str, Any]]:
        """The last warning of each kind: ``id``, ``text``, ``time`` (seconds since 1970); the newest first."""
        return sorted(self._given.values(), key=lambda one: -float(one["time"]))

    def step(self, stats: Callable[[], Mapping[str, Any]], config: Config, worst: Worst) -> None:
        """Judge if it is time to, and write what is new to the log.

        Args:
            stats: ``Runtime.stats``.
            config: what is in effect.
            worst: see ``Seen.worst``.
        """
        now = self._clock()
        if now < self._next:
            return
        self._next = now + INTERVAL_S
        self._seen = self._seen.next(stats(), config, worst)
        for name, rule in RULES.items():
            text = rule(self._seen)
            if text is not None and now >= self._said_at.get(name, now):
                self._said_at[name] = now + REPEAT_S
                self._given[name] = {"id": name, "text": text, "time": self._wall()}
                logger.warning("dflash2_advice %s: %s", name, text)
