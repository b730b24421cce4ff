"""Heat in SGLang's own eviction: which of the leaves that its LRU offers are spared for now.

SGLang's tree (compiled) offers device leaves, the longest unused first. A leaf that is clearly hotter than those that
went lately is passed over, so that conversations outlive prompts that never return. Work per leaf is constant,
whatever the size of the tree. Everything here follows from what all ranks see alike: what requests found and computed,
in which order, and the turnover clock; so all ranks spare the same leaves.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

from dflash2.integrations.sglang.clock import TURNOVER_S

REMEMBERED = 4
"""Pages remembered, in sizes of the device pool: those that left it for a while keep their history."""
CLEARLY = 1.1
"""A leaf is spared when its heat is so many times the average of those that went lately."""
SMOOTHING = 1 / 16
"""Weight of the newest leaf in that average."""
MEMORY = 3 * TURNOVER_S
"""Time in which a use fades: what is about to leave was last used about one turnover ago. One turnover instead of
three brought half as much on made-up traffic."""
MOST_SPARED = 32
"""Leaves spared in one eviction, at most: the work has a bound, and so has the wait for room."""


class DeviceHeat:
    """Own counters of uses, by page hash: the last page of a leaf is used whenever the leaf is.

    Args:
        num_pages: of the device pool.
        clock: turnover time.
    """

    def __init__(self, num_pages: int, clock: Callable[[], float]) -> None:
        self._most = REMEMBERED * num_pages
        self._clock = clock
        self._uses: dict[str, tuple[float, float]] = {}
        """Decayed number of uses and time of the last, the longest unused first."""
        self._average: float | None = None
        self._spares_left = 0
        self.num_spared = 0
        """Leaves spared since the start."""

    def used(self, page_hashes: Iterable[str]) -> None:
        """These pages were computed, or found by a request."""
        now = self._clock()
        for page in page_hashes:
            self._uses[page] = (self._decayed(self._uses.pop(page, (0.0, now)), now) + 1.0, now)
        while len(self._uses) > self._most:
            del self._uses[next(iter(self._uses))]

    def begin(self, *, sparing: bool) -> None:
        """An eviction begins; not sparing: all it is offered may go."""
        self._spares_left = MOST_SPARED if sparing else 0

    def spares(self, last_page: str | None) -> bool:
        """Whether the leaf with this last page is passed over; None if SGLang has no hash of it."""
        now = self._clock()
        known = None if last_page is None else self._uses.get(last_page)
        heat = 0.0 if known is None else -math.expm1(-self._decayed(known, now))
        average = heat if self._average is None else self._average
        if self._spares_left > 0 and heat > CLEARLY * average:
            self._spares_left -= 1
            self.num_spared += 1
            return True
        self._average = average + SMOOTHING * (heat - average)
        return False

    def clear(self) -> None:
        """Nothing is cached any more."""
        self._uses.clear()
        self._average = None

    @staticmethod
    def _decayed(uses: tuple[float, float], now: float) -> float:
        count, last = uses
        return count * math.exp((last - now) / MEMORY)
