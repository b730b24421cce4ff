"""Which segment a request's blocks belong to, and what became of those that its session used before."""

from __future__ import annotations

from collections import Counter

import numpy as np

from dflash2.policy.forecast import NUM_SHARED_CLASSES, Forecaster, Request
from dflash2.policy.segments import SHARED, SegmentClass, SegmentStore
from dflash2.policy.sessions import WIDELY_SHARED
from dflash2.policy.shares import ShareOfUse
from dflash2.table.page_table import PageTable
from dflash2.types import IntArray

LEVEL_OF_SHARERS = np.clip(np.log2(np.maximum(np.arange(256), 1)).astype(np.int64) - 1, 0, NUM_SHARED_CLASSES - 2)
"""Class of a block by how many sessions share it."""


class Assignment:
    """Puts blocks into segments when they are used.

    Args:
        segments: filled here.
        changed: segments whose value is not what it was are added to it.
    """

    def __init__(self, segments: SegmentStore, changed: set[int]) -> None:
        self._segments = segments
        self._changed = changed
        self.shares = ShareOfUse()

    def take_over(self, ids: IntArray, now: float) -> None:
        """Blocks that exist, of nobody known."""
        segment = self._segments.new(0, SegmentClass.UNKNOWN, 0, 1.0, now)
        self._segments.move(ids, segment)
        self._changed.add(segment)

    def take_over_new(self, ids: IntArray, now: float) -> None:
        """New blocks of nobody known."""
        segment = self._segments.new(0, SegmentClass.UNKNOWN, 0, 1.0, now)
        self._segments.note_new(ids, None)
        self._segments.put(ids, segment)
        self._changed.add(segment)

    def are_its_own(self, request: Request, of_used: IntArray) -> bool:
        """All blocks that a request uses, given their segments, are one segment of its session: the rule."""
        if not len(of_used):
            return True
        first = of_used.item(0)
        segments = self._segments
        mine = segments.belongs(first, request.session.row) and segments.kind.item(first) < SHARED
        return mine and bool((of_used == first).all())

    def settle(self, table: PageTable, request: Request, of_used: IntArray) -> None:
        """Which blocks of the session's last request are used again, given their segments; the others were left."""
        if request.previous is None:
            return
        segments, row = self._segments, request.session.row
        for segment in request.previous:
            if not segments.belongs(segment, row):
                continue
            kind, level = SegmentClass(segments.kind.item(segment)), segments.level.item(segment)
            if kind is SegmentClass.SHARED:
                continue
            num_used = int(np.count_nonzero(of_used == segment))
            num_blocks = num_used if num_used == segments.num_blocks.item(segment) else segments.count(table, segment)
            if not num_blocks:
                continue
            self.shares.note(kind, level, num_used / num_blocks)
            if num_used < num_blocks:
                level = self.shares.level_left(kind, level)
                segments.leave(segment, level, self.shares.of(SegmentClass.LEFT, level))
                request.session.segments.append(segment)
        request.previous = None

    def assign_own(self, request: Request, ids: IntArray, now: float) -> None:
        """Put the request's next blocks, which nobody but its session has used since it did, into its segments."""
        request.num_seen += len(ids)
        self._move_own(request, ids, now, new=False)

    def assign(self, request: Request, ids: IntArray, now: float) -> None:
        """The same for blocks that others may have used."""
        segments = self._segments
        segments.count_session(ids, request.session.row)
        sharers = segments.num_sessions_of[ids]
        rest = ids
        if sharers.max() >= WIDELY_SHARED:
            shared = sharers >= WIDELY_SHARED
            levels = LEVEL_OF_SHARERS[sharers[shared]]
            for level in set(levels.tolist()):
                self._move(request, ids[shared][levels == level], SegmentClass.SHARED, level, now, new=False)
            rest = ids[~shared]
        request.num_seen += len(ids)
        self._move_own(request, rest, now, new=False)

    def assign_new(self, request: Request, ids: IntArray, now: float) -> None:
        """The same for blocks that nobody has used before."""
        self._segments.note_new(ids, request.session.row)
        request.num_seen += len(ids)
        self._move_own(request, ids, now, new=True)

    def _move_own(self, request: Request, ids: IntArray, now: float, *, new: bool) -> None:
        """Blocks that the session does not share with many."""
        if request.partial_tail and request.num_seen == request.num_keys and len(ids):
            self._move(request, ids[-1:], SegmentClass.TAIL, 0, now, new=new)
            ids = ids[:-1]
        if len(ids):
            self._move(request, ids, SegmentClass.MAIN, 0, now, new=new)

    def note_shared_use(self, forecast: Forecaster, of_used: IntArray, now: float) -> None:
        """Blocks of several sessions, or of nobody known, are used: how long that took is learned from."""
        segments = self._segments
        undecided = of_used[segments.kind[of_used] >= SHARED]
        for segment, count in Counter(undecided.tolist()).items():
            age = now - segments.touched_s.item(segment)
            forecast.touches.note_use(segments.touch_class_of(segment), age, count)

    def _move(self, request: Request, ids: IntArray, kind: SegmentClass, level: int, now: float, *, new: bool) -> None:
        segments, row = self._segments, request.session.row
        segment = request.segments.get((kind, level))
        if segment is None or not segments.belongs(segment, row):
            segment = segments.new(row, kind, level, self.shares.of(kind, level), now)
            request.segments[kind, level] = segment
            request.session.segments.append(segment)
        segments.touched_s[segment] = now
        if new:
            segments.put(ids, segment)
        else:
            segments.move(ids, segment)
        self._changed.add(segment)
