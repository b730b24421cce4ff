"""block_key → block_id for all published blocks."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from dflash2.errors import IntegrityError
from dflash2.table.page_table import BlockState, PageTable
from dflash2.types import BoolArray, IntArray


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
        found: list[int] = []
        for key in keys:
            block_id = self._ids.get(key)
            if block_id is None:
                break
            found.append(block_id)
        ids = np.array(found, np.int32)
        gone = np.flatnonzero(self._table.present[ids] == 0)
        return ids[: gone[0]] if len(gone) else ids

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

    def publish_chain(self, ids: IntArray, keys: Sequence[bytes], parent_key: bytes, position: int) -> int:
        """``try_publish`` for consecutive SEALED blocks of one sequence.

        Args:
            ids: int32 ``[n]``, distinct.
            keys: of these blocks.
            parent_key: key of the block before the first.
            position: index of the first in its sequence.

        Returns:
            How many were published; the others are known already or their parent is not published.
        """
        if len(ids) == 1:  # a decode step: numbers instead of arrays take a tenth of the time
            return int(self.try_publish(int(ids[0]), keys[0], parent_key, position))
        parent = self._ids.get(parent_key) if position else None
        new: list[int] = []
        parents: list[int] = []
        for offset, (block_id, key) in enumerate(zip(ids.tolist(), keys, strict=True)):
            known = self._ids.get(key)
            if known is None and (parent is not None or position + offset == 0):
                self._ids[key] = known = block_id
                self._keys[block_id] = key
                new.append(offset)
                parents.append(0 if parent is None else parent)
            parent = known
        table, published = self._table, ids[new]
        table.position[published] = position + np.array(new, np.int32)
        table.state[published] = BlockState.PUBLISHED
        table.parent[published] = parents
        np.add.at(table.num_children, table.parent[published[table.position[published] > 0]], 1)
        return len(new)

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

    def ends_among(self, ids: IntArray) -> BoolArray:
        """bool ``[n]``: all that follows this published block is among ``ids`` as well (int32 ``[n]``, distinct)."""
        table = self._table
        ends = np.ones(len(ids), np.bool_)
        while True:
            kept = ids[ends]
            followers = kept[table.position[kept] > 0]
            parents, counts = np.unique(table.parent[followers], return_counts=True)
            among = np.zeros(len(ids), np.int64)
            _, at, which = np.intersect1d(ids, parents, assume_unique=True, return_indices=True)
            among[at] = counts[which]
            still = ends & (table.num_children[ids] == among)
            if np.array_equal(still, ends):
                return ends
            ends = still

    def unpublish_ends(self, ids: IntArray) -> None:
        """Take blocks out of the index of which each has all its followers among ``ids``; they become SEALED."""
        table = self._table
        followers = ids[table.position[ids] > 0]
        np.subtract.at(table.num_children, table.parent[followers], 1)
        for block_id in ids.tolist():
            del self._ids[self._keys.pop(block_id)]
        table.state[ids] = BlockState.SEALED

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
