"""Blocks in groups that stand or fall together: what the last request that touched them left, by class.

All blocks of a group share one next use, so a group has one value and its blocks are given up from the tail. The work
per request is per group, and blocks are looked at only as whole arrays.
"""

from __future__ import annotations

from enum import IntEnum

import numpy as np
import numpy.typing as npt

from dflash2.policy.arrays import Ints
from dflash2.table.page_table import BlockState, PageTable
from dflash2.types import IntArray


class SegmentClass(IntEnum):
    """What the blocks of a segment are to their session."""

    MAIN = 0
    """The prompt and what was generated: used by the next turn."""
    TAIL = 1
    """The last block, not full: used only by the very same prompt."""
    LEFT = 2
    """Not used by the session's next request although it was there: a branch that was given up."""
    SHARED = 3
    """Common to several sessions: used by whoever comes next."""
    UNKNOWN = 4
    """Not of any request: found on NVMe after a restart, or from an engine that tells nothing."""


SHARED, UNKNOWN = int(SegmentClass.SHARED), int(SegmentClass.UNKNOWN)
"""Looking up a member of an enum takes as long as reading an array."""

UNKNOWN_SEGMENT = 0
CLASS_OF_NOBODY = 6
"""In the model of touches: after the levels of what is shared."""


class SegmentStore:
    """Which block is in which segment, and the figures of each segment, as arrays.

    A segment's number may be given to another one after ``sweep`` has found it empty.
    """

    def __init__(self) -> None:
        self.of_block: npt.NDArray[np.int32] = np.zeros(0, np.int32)
        self.num_sessions_of: npt.NDArray[np.uint8] = np.zeros(0, np.uint8)
        """Sessions that have used a block, up to 200."""
        self._last_session: npt.NDArray[np.int32] = np.zeros(0, np.int32)
        self.session = np.zeros(64, np.int32)
        self.kind = np.zeros(64, np.uint8)
        self.level = np.zeros(64, np.uint8)
        self.touched_s = np.zeros(64)
        self.share = np.ones(64, np.float32)
        """Probability that the blocks are used when their session comes back."""
        self.num_blocks = np.zeros(64, np.int64)
        """Upper bound: blocks that were freed since are counted until the next sweep."""
        self.kind[UNKNOWN_SEGMENT] = SegmentClass.UNKNOWN
        self.live: npt.NDArray[np.bool_] = np.zeros(64, np.bool_)
        self.live[UNKNOWN_SEGMENT] = True
        self._free = list(range(63, UNKNOWN_SEGMENT, -1))
        self._ids: dict[int, list[IntArray]] = {UNKNOWN_SEGMENT: []}

    def fit_table(self, table: PageTable) -> None:
        """Have a place for each row of the table."""
        if len(self.of_block) < table.num_rows:
            self.of_block = np.zeros(table.num_rows, np.int32)
            self.num_sessions_of = np.zeros(table.num_rows, np.uint8)
            self._last_session = np.zeros(table.num_rows, np.int32)

    def new(self, session: int, kind: SegmentClass, level: int, share: float, now: float) -> int:
        """An empty segment."""
        if not self._free:
            self._grow()
        segment = self._free.pop()
        self.session[segment] = session
        self.kind[segment] = kind
        self.level[segment] = level
        self.touched_s[segment] = now
        self.share[segment] = share
        self.num_blocks[segment] = 0
        self.live[segment] = True
        self._ids[segment] = []
        return segment

    def note_new(self, ids: IntArray, session: int | None) -> None:
        """These rows were given to new blocks, used by this session first; None if nobody is known to use them."""
        self.num_sessions_of[ids] = 0 if session is None else 1
        self._last_session[ids] = 0 if session is None else session

    def count_session(self, ids: IntArray, session: int) -> None:
        """A session uses these blocks."""
        count = self.num_sessions_of[ids]
        other = (count == 0) | (self._last_session[ids] != session)
        if other.any():  # else it came back alone, the rule
            self.num_sessions_of[ids] = np.where(other & (count < 200), count + 1, count)
            self._last_session[ids] = session

    def move(self, ids: IntArray, segment: int) -> None:
        """Put blocks into a segment, out of those they were in."""
        old = self.of_block[ids]
        if (old == old[:1]).all():  # the rule
            self.num_blocks[old[:1]] -= len(ids)
        else:
            self.num_blocks -= np.bincount(old, minlength=len(self.num_blocks))
        self.put(ids, segment)

    def put(self, ids: IntArray, segment: int) -> None:
        """Put new blocks into a segment: in what others their rows were before is nobody's business."""
        self.of_block[ids] = segment
        self.num_blocks[segment] += len(ids)
        self._ids[segment].append(ids)

    def belongs(self, segment: int, session: int) -> bool:
        """The segment is that session's, and only its return decides about it."""
        mine = self.live.item(segment) and self.session.item(segment) == session
        return bool(mine and self.kind.item(segment) != UNKNOWN)

    def leave(self, segment: int, level: int, share: float) -> None:
        """What is left of the segment was not used by its session's next request."""
        self.kind[segment] = SegmentClass.LEFT
        self.level[segment] = level
        self.share[segment] = share

    def disown(self, session: int) -> None:
        """The session is forgotten; its blocks count as nobody's."""
        mine = self.live & (self.session == session) & (self.kind < SHARED)
        self.kind[mine] = SegmentClass.UNKNOWN
        self.level[mine] = 0

    def split(self) -> tuple[Ints, Ints]:
        """Numbers of the segments that one session decides about, and of the others."""
        shared = self.live & (self.kind >= SHARED)
        return np.flatnonzero(self.live & ~shared), np.flatnonzero(shared)

    def touch_class(self, segments: Ints) -> Ints:
        """Class of shared segments in the model of touches: by how many share them, then those of nobody."""
        shared = self.kind[segments] == SHARED
        return np.where(shared, self.level[segments], CLASS_OF_NOBODY).astype(np.int64)

    def touch_class_of(self, segment: int) -> int:
        """``touch_class`` of a single one."""
        return self.level.item(segment) if self.kind.item(segment) == SHARED else CLASS_OF_NOBODY

    def count(self, table: PageTable, segment: int) -> int:
        """How many blocks are in a segment now."""
        return sum(
            int(np.count_nonzero((self.of_block[ids] == segment) & (table.state[ids] != BlockState.FREE)))
            for ids in self._ids[segment]
        )

    def sweep(self, table: PageTable) -> None:
        """Count blocks anew and take back segments that have none."""
        in_use = table.state != BlockState.FREE
        self.num_blocks = np.bincount(self.of_block[in_use], minlength=len(self.live))
        empty = self.live & (self.num_blocks == 0)
        empty[UNKNOWN_SEGMENT] = False
        gone = np.flatnonzero(empty)
        self.live[gone] = False
        self._free += gone.tolist()
        for segment in gone.tolist():
            del self._ids[segment]

    def _grow(self) -> None:
        size = len(self.live)
        for name in ("session", "kind", "level", "touched_s", "share", "num_blocks", "live"):
            column = getattr(self, name)
            setattr(self, name, np.concatenate([column, np.zeros_like(column)]))
        self._free = list(range(2 * size - 1, size - 1, -1))
