"""Requests that wait for admission: what they will find in the cache, and its way up while they wait."""

from __future__ import annotations

import numpy as np

from dflash2.table.page_table import PageTable
from dflash2.table.prefix_index import PrefixIndex
from dflash2.types import IntArray

LOOKED_AFTER = 8
"""Waiting requests, from the first on, whose blocks are brought nearer; the window of the prefetcher is as small."""


class Arrivals:
    """The queue is knowledge: the next use of a waiting request's blocks is not guessed.

    Keys are kept, not ids: what nobody holds may be forgotten, and its row given to another block, before its turn.

    Args:
        table: page table; ``next_use`` is written.
        index: finds the blocks.
    """

    def __init__(self, table: PageTable, index: PrefixIndex) -> None:
        self._table = table
        self._index = index
        self._keys: dict[str, list[bytes]] = {}

    def __len__(self) -> int:
        return len(self._keys)

    def note(self, request_id: str, keys: list[bytes], now: float) -> int:
        """A request has arrived.

        Args:
            request_id: unique among those that wait.
            keys: of the full blocks of its prompt, in order.
            now: seconds.

        Returns:
            How many of them, from the first on, are cached.
        """
        ids = self._index.longest_prefix(keys)
        if len(ids):
            self._keys[request_id] = keys[: len(ids)]
            self._table.next_use[ids] = now
        return len(ids)

    def forget(self, request_id: str) -> None:
        """It was admitted, or left. Idempotent; its blocks are no longer expected."""
        keys = self._keys.pop(request_id, None)
        if keys is not None:
            self._table.next_use[self._index.longest_prefix(keys)] = np.inf

    def upcoming(self) -> IntArray:
        """int32, distinct blocks of those who have waited longest, in the order in which they will be needed."""
        found = [self._index.longest_prefix(keys) for keys in list(self._keys.values())[:LOOKED_AFTER]]
        if not found:
            return np.empty(0, np.int32)
        every = np.concatenate(found)
        _, first = np.unique(every, return_index=True)
        ids: IntArray = every[np.sort(first)]
        return ids
