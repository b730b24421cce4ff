"""Least frequently used."""

from __future__ import annotations

from collections import OrderedDict


class LFU:
    """Gives up the block used least often while it was held; among equals the one that reached that count first."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._counts: dict[int, int] = {}
        self._by_count: dict[int, OrderedDict[int, None]] = {}
        self._least = 1

    def __contains__(self, block: int) -> bool:
        return block in self._counts

    def touch(self, block: int) -> None:
        count = self._counts.get(block, 0)
        if count:
            self._remove(block, count)
        elif len(self._counts) >= self._capacity:
            self._evict()
        self._counts[block] = count + 1
        self._by_count.setdefault(count + 1, OrderedDict())[block] = None
        if not count:
            self._least = 1
        elif self._least == count and count not in self._by_count:
            self._least = count + 1

    def _remove(self, block: int, count: int) -> None:
        equals = self._by_count[count]
        del equals[block]
        if not equals:
            del self._by_count[count]

    def _evict(self) -> None:
        while self._least not in self._by_count:
            self._least += 1
        block = next(iter(self._by_count[self._least]))
        self._remove(block, self._least)
        del self._counts[block]
