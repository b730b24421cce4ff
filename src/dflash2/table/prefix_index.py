"""block_key → block_id for all published blocks."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from dflash2.errors import IntegrityError
from dflash2.table.page_table import BlockState, PageTable
from dflash2.types import IntArray


class PrefixIndex:
    """Finds published blocks by key and keeps the tree of who follows whom.

    Every published block but a sequence's first has a published parent, so walking a chain of keys from its head
    meets no hole (invariant 5).
    """

    def __init__(self, table: PageTable) -> None:
        self._table = table
        self._ids: dict[bytes, int] = {}
        self._keys: dict[int, bytes] = {}

    def __len__(self) -> int:
        return len(self._ids)

    def get(self, key: bytes) -> int | None:
        return self._ids.get(key)

    def key_of(self, block_id: int) -> bytes | None:
        """The key of a published block."""
        return self._keys.get(block_id)

    def longest_prefix(self, keys: Sequence[bytes]) -> IntArray:
        """Ids of the leading blocks that are published and have a copy on some tier."""
        ids: list[int] = []
        for key in keys:
            block_id = self._ids.get(key)
            if block_id is None or not self._table.present[block_id]:
                break
            ids.append(block_id)
        return np.array(ids, np.int32)

    def try_publish(self, block_id: int, key: bytes, parent_key: bytes, position: int) -> bool:
        """Make a SEALED block findable.

        Returns:
            False, and no change, if the key is taken by another block or the parent is not published.
        """
        table = self._table
        if key in self._ids:
            return False
        if position > 0:
            parent = self._ids.get(parent_key)
            if parent is None:
                return False
            table.parent[block_id] = parent
            table.num_children[parent] += 1
        table.position[block_id] = position
        table.state[block_id] = BlockState.PUBLISHED
        self._ids[key] = block_id
        self._keys[block_id] = key
        return True

    def adopt(self, block_id: int, key: bytes) -> None:
        """Publish a block found on NVMe after a restart; its parent is not known yet and it counts as a head."""
        self._table.state[block_id] = BlockState.PUBLISHED
        self._table.position[block_id] = 0
        self._ids[key] = block_id
        self._keys[block_id] = key

    def unpublish(self, block_id: int) -> list[int]:
        """Take a block and all that follow it out of the index; they become SEALED.

        Returns:
            Ids of all blocks taken out, this one first.
        """
        table = self._table
        taken = [block_id]
        frontier = [block_id]
        while frontier:
            current = frontier.pop()
            if table.num_children[current]:
                follows = (table.parent == current) & (table.state == BlockState.PUBLISHED) & (table.position > 0)
                children = [int(child) for child in np.flatnonzero(follows)]
                taken += children
                frontier += children
        if table.position[block_id] > 0:
            table.num_children[table.parent[block_id]] -= 1
        for taken_id in taken:
            del self._ids[self._keys.pop(taken_id)]
        table.state[taken] = BlockState.SEALED
        table.num_children[taken] = 0
        return taken

    def clear(self) -> None:
        """Unpublish everything."""
        ids = list(self._keys)
        self._table.state[ids] = BlockState.SEALED
        self._table.num_children[ids] = 0
        self._ids.clear()
        self._keys.clear()

    def check_integrity(self) -> None:
        """Raise IntegrityError if index, states and the tree disagree."""
        table = self._table
        published = np.flatnonzero(table.state == BlockState.PUBLISHED)
        if set(published.tolist()) != set(self._keys) or len(self._ids) != len(self._keys):
            raise IntegrityError("the prefix index and the page table disagree about what is published")
        followers = published[table.position[published] > 0]
        counts = np.bincount(table.parent[followers], minlength=table.num_rows)
        if np.any(counts != table.num_children):
            raise IntegrityError("child counts are wrong")
        if np.any(table.state[table.parent[followers]] != BlockState.PUBLISHED):
            raise IntegrityError("a published block has a parent that is not published")
