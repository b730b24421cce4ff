"""S3-FIFO: Yang and others, "FIFO queues are all you need for cache eviction", SOSP 2023, algorithm 1."""

from __future__ import annotations

from collections import OrderedDict

SMALL_SHARE = 0.1
MAX_USES = 3
MOVE_AT = 2
"""Uses in the small queue, after the first, that earn a place in the main one."""


class S3FIFO:
    """A small queue where most blocks that are used once end, a main queue with second chances, a queue of ghosts."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._small_capacity = max(1, int(SMALL_SHARE * capacity))
        self._ghost_capacity = capacity - self._small_capacity
        self._small: OrderedDict[int, None] = OrderedDict()
        self._main: OrderedDict[int, None] = OrderedDict()
        self._ghosts: OrderedDict[int, None] = OrderedDict()
        self._uses: dict[int, int] = {}

    def __contains__(self, block: int) -> bool:
        return block in self._uses

    def touch(self, block: int) -> None:
        if block in self._uses:
            self._uses[block] = min(MAX_USES, self._uses[block] + 1)
            return
        while len(self._small) + len(self._main) >= self._capacity:
            self._evict()
        if block in self._ghosts:
            del self._ghosts[block]
            self._main[block] = None
        else:
            self._small[block] = None
        self._uses[block] = 0

    def _evict(self) -> None:
        if len(self._small) >= self._small_capacity or not self._main:
            self._evict_from_small()
        else:
            self._evict_from_main()

    def _evict_from_small(self) -> None:
        block, _ = self._small.popitem(last=False)
        if self._uses[block] >= MOVE_AT:
            self._uses[block] = 0
            self._main[block] = None
        else:
            del self._uses[block]
            self._ghosts[block] = None
            if len(self._ghosts) > self._ghost_capacity:
                self._ghosts.popitem(last=False)

    def _evict_from_main(self) -> None:
        while True:
            block, _ = self._main.popitem(last=False)
            if not self._uses[block]:
                del self._uses[block]
                return
            self._uses[block] -= 1
            self._main[block] = None
