"""ARC: Megiddo and Modha, "ARC: A Self-Tuning, Low Overhead Replacement Cache", FAST 2003, figure 4."""

from __future__ import annotations

from collections import OrderedDict


class ARC:
    """Balances recency and frequency by what its two lists of ghosts say that it should have kept."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._target = 0.0
        """Wanted length of ``_recent`` (p in the paper)."""
        self._recent: OrderedDict[int, None] = OrderedDict()
        self._frequent: OrderedDict[int, None] = OrderedDict()
        self._recent_ghosts: OrderedDict[int, None] = OrderedDict()
        self._frequent_ghosts: OrderedDict[int, None] = OrderedDict()

    def __contains__(self, block: int) -> bool:
        return block in self._recent or block in self._frequent

    def touch(self, block: int) -> None:
        if block in self._recent:
            del self._recent[block]
        elif block in self._frequent:
            del self._frequent[block]
        elif block in self._recent_ghosts:
            step = max(1.0, len(self._frequent_ghosts) / len(self._recent_ghosts))
            self._target = min(float(self._capacity), self._target + step)
            self._replace(block)
            del self._recent_ghosts[block]
        elif block in self._frequent_ghosts:
            step = max(1.0, len(self._recent_ghosts) / len(self._frequent_ghosts))
            self._target = max(0.0, self._target - step)
            self._replace(block)
            del self._frequent_ghosts[block]
        else:
            self._make_room(block)
            self._recent[block] = None
            return
        self._frequent[block] = None

    def _make_room(self, block: int) -> None:
        recent = len(self._recent) + len(self._recent_ghosts)
        every = recent + len(self._frequent) + len(self._frequent_ghosts)
        if recent >= self._capacity:
            if len(self._recent) < self._capacity:
                _pop_oldest(self._recent_ghosts)
                self._replace(block)
            else:
                _pop_oldest(self._recent)
        elif every >= self._capacity:
            if every >= 2 * self._capacity:
                _pop_oldest(self._frequent_ghosts)
            self._replace(block)

    def _replace(self, block: int) -> None:
        long = len(self._recent) > self._target
        exact = len(self._recent) == self._target and block in self._frequent_ghosts
        if self._recent and (long or exact):
            self._recent_ghosts[_pop_oldest(self._recent)] = None
        else:
            self._frequent_ghosts[_pop_oldest(self._frequent)] = None


def _pop_oldest(blocks: OrderedDict[int, None]) -> int:
    return blocks.popitem(last=False)[0]
