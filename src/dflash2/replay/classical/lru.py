"""Least recently used."""

from __future__ import annotations

from collections import OrderedDict


class LRU:
    """Gives up the block unused for longest."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._blocks: OrderedDict[int, None] = OrderedDict()

    def __contains__(self, block: int) -> bool:
        return block in self._blocks

    def touch(self, block: int) -> None:
        if block in self._blocks:
            self._blocks.move_to_end(block)
            return
        if len(self._blocks) >= self._capacity:
            self._blocks.popitem(last=False)
        self._blocks[block] = None
