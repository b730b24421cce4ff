"""W-TinyLFU: Einziger, Friedman and Manes, "TinyLFU: A Highly Efficient Cache Admission Policy", 2017.

With exact counts in place of a sketch: what it can do at best.
"""

from __future__ import annotations

from collections import OrderedDict

WINDOW_SHARE = 0.01
PROTECTED_SHARE = 0.8
SAMPLE = 10
"""Counts are halved after so many uses per block of capacity."""
MAX_COUNT = 15


class WTinyLFU:
    """A small LRU window; what leaves it must have been used more often than the block it would replace."""

    def __init__(self, capacity: int) -> None:
        self._window_capacity = max(1, int(WINDOW_SHARE * capacity))
        self._main_capacity = capacity - self._window_capacity
        self._protected_capacity = int(PROTECTED_SHARE * self._main_capacity)
        self._window: OrderedDict[int, None] = OrderedDict()
        self._probation: OrderedDict[int, None] = OrderedDict()
        self._protected: OrderedDict[int, None] = OrderedDict()
        self._counts: dict[int, int] = {}
        self._sample = SAMPLE * capacity
        self._seen = 0

    def __contains__(self, block: int) -> bool:
        return block in self._window or block in self._probation or block in self._protected

    def touch(self, block: int) -> None:
        self._count(block)
        if block in self._window:
            self._window.move_to_end(block)
        elif block in self._protected:
            self._protected.move_to_end(block)
        elif block in self._probation:
            del self._probation[block]
            self._protect(block)
        else:
            self._window[block] = None
            if len(self._window) > self._window_capacity:
                self._offer(_pop_oldest(self._window))

    def _count(self, block: int) -> None:
        self._counts[block] = min(MAX_COUNT, self._counts.get(block, 0) + 1)
        self._seen += 1
        if self._seen >= self._sample:
            self._seen = 0
            self._counts = {block: count // 2 for block, count in self._counts.items() if count > 1}

    def _protect(self, block: int) -> None:
        self._protected[block] = None
        if len(self._protected) > self._protected_capacity:
            self._probation[_pop_oldest(self._protected)] = None

    def _offer(self, block: int) -> None:
        """A block leaves the window: into the main part if it deserves it more than that part's next victim."""
        if len(self._probation) + len(self._protected) < self._main_capacity:
            self._probation[block] = None
            return
        main = self._probation or self._protected
        if not main:
            return
        victim = next(iter(main))
        if self._counts.get(block, 0) > self._counts.get(victim, 0):
            del main[victim]
            self._probation[block] = None


def _pop_oldest(blocks: OrderedDict[int, None]) -> int:
    return blocks.popitem(last=False)[0]
