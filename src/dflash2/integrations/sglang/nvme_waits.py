"""Requests whose blocks are on their way from NVMe to DRAM: for how long they hold up others, and when they give up."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from enum import IntEnum

logger = logging.getLogger(__name__)

HOLD_S = 0.05
"""For so long others do not pass: most reads are over sooner than the prompt that would be computed meanwhile."""
PATIENCE_S = 10.0
"""Longest time that a request waits before it is computed again."""


class Wait(IntEnum):
    """How a request waits. Where ranks differ, the largest counts."""

    NOT = 0
    PASSED = 1
    """Others go ahead."""
    HOLDS = 2
    """Those behind it wait as well."""


class NvmeWaits:
    """Since when requests wait.

    Args:
        clock: seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._since: dict[str, float | None] = {}
        """None while its blocks have not started."""
        self._gave_up: set[str] = set()

    def gave_up(self, rid: str) -> bool:
        """It is not to wait again."""
        return rid in self._gave_up

    def note(self, rid: str, *, started: bool) -> None:
        """It waits; its blocks have started, now or earlier, or have no room yet."""
        since = self._since.get(rid)
        self._since[rid] = self._clock() if started and since is None else since

    def over(self, rid: str) -> None:
        """It waits no longer. Idempotent."""
        self._since.pop(rid, None)

    def of(self, rid: str) -> Wait:
        """How the request waits at this moment, on this rank."""
        if rid not in self._since:
            return Wait.NOT
        since = self._since[rid]
        if since is None:
            return Wait.PASSED
        waited = self._clock() - since
        if waited < PATIENCE_S:
            return Wait.HOLDS if waited < HOLD_S else Wait.PASSED
        del self._since[rid]
        self._gave_up.add(rid)
        logger.warning("dflash2_swap request %s waited %.0f s for NVMe and is computed again", rid, PATIENCE_S)
        return Wait.NOT

    def forget(self, rid: str) -> None:
        """The request runs, or is gone. Idempotent."""
        self.over(rid)
        self._gave_up.discard(rid)

    def clear(self) -> None:
        """Nobody waits."""
        self._since.clear()
        self._gave_up.clear()
