"""What the blocks of each segment are worth, kept from one question to the next: a request changes only a few."""

from __future__ import annotations

import math

import numpy as np

from dflash2.policy.arrays import Floats, Ints
from dflash2.policy.outlook import Outlook
from dflash2.policy.segments import SHARED, SegmentStore
from dflash2.table.page_table import PageTable
from dflash2.types import FloatArray, IntArray

VALUES_STAY = 0.02
"""Part of the horizon for which the value of a segment is taken to stay what it was."""


class SegmentValues:
    """Value and chance of use by segment.

    Args:
        segments: whose they are.
        outlook: of their sessions.
    """

    def __init__(self, segments: SegmentStore, outlook: Outlook) -> None:
        self._segments = segments
        self.outlook = outlook
        self._computed_at = -math.inf
        self._values: Floats = np.zeros(0)
        self._ascending: Ints = np.zeros(0, np.int64)
        self._sizes: Ints = np.zeros(0, np.int64)
        """Of ``_ascending``: blocks up to and including each segment, as of when all values were computed."""
        self._num_gone = 0
        """Of the least valuable of these blocks, those that had left when some were chosen last: they leave first."""
        self.changed: set[int] = set()
        """Segments whose value is not what it was: to be filled by who changes them."""

    def of_segments(self, now: float, horizon_s: float) -> Floats:
        """Expected uses per second of each segment, ``[segments]``; infinite where there is none.

        All are computed anew when the last time is more than a small part of the horizon ago; in between only those of
        sessions that something has happened to.
        """
        segments = self._segments
        stale = now - self._computed_at > VALUES_STAY * horizon_s or now < self._computed_at
        if stale or len(self._values) != len(segments.live):
            self._values = np.full(len(segments.live), np.inf)
            self._compute(*segments.split(), now)
            self._computed_at = now
            self._ascending = np.argsort(self._values, kind="stable")
            self._sizes = np.cumsum(segments.num_blocks[self._ascending])
        else:
            for segment in self.changed:
                if segments.live[segment]:
                    self._values[segment] = self._value(segment, now)
        self.changed.clear()
        return self._values

    def chances(self, now: float, horizon_s: float) -> FloatArray:
        """Probability of a use within ``horizon_s``, of each segment's blocks, ``[segments]``."""
        chances = np.zeros(len(self._segments.live), np.float32)
        self._set_chances(chances, *self._segments.split(), now, horizon_s)
        return chances

    def chances_of(self, segment: IntArray, now: float, horizon_s: float) -> FloatArray:
        """The same for blocks of these segments, ``[n]``; for a few blocks among many segments."""
        among, place = np.unique(segment.astype(np.int64), return_inverse=True)
        shared = self._segments.kind[among] >= SHARED
        chances = np.zeros(len(self._segments.live), np.float32)
        self._set_chances(chances, among[~shared], among[shared], now, horizon_s)
        return chances[among][place]

    def least(self, table: PageTable, ids: IntArray, count: int) -> IntArray:
        """Those of ``ids`` that may be among the ``count`` least valuable: whole segments, from the least on."""
        ascending, sizes, values = self._ascending, self._sizes, self._values
        segment = self._segments.of_block.take(ids)
        wanted = count + self._num_gone
        while True:
            at = int(np.searchsorted(sizes, wanted))
            if at >= len(ascending):
                return ids
            among = values <= values[ascending[at]]
            chosen: IntArray = ids.compress(among.take(segment))
            expected = np.isfinite(table.next_use[chosen]) | (table.ref_count[chosen] > 0)
            num_found = len(chosen) - int(np.count_nonzero(expected))
            if num_found >= count:
                self._num_gone = max(0, int(sizes[at]) - num_found)
                return chosen
            wanted = 2 * (wanted + count)

    def _value(self, segment: int, now: float) -> float:
        segments = self._segments
        if segments.kind[segment] >= SHARED:
            number = segments.touch_class_of(segment)
            return self.outlook.value_of_touch(number, segments.touched_s.item(segment), now)
        of_session = self.outlook.value_of_session(segments.session.item(segment), now)
        return of_session * segments.share.item(segment)

    def _compute(self, decided: Ints, shared: Ints, now: float) -> None:
        segments = self._segments
        if len(decided):
            value = self.outlook.session_value(segments.session[decided].astype(np.int64), now)
            self._values[decided] = value * segments.share[decided]
        if len(shared):
            touched = segments.touched_s[shared]
            self._values[shared] = self.outlook.touch_value(segments.touch_class(shared), touched, now)

    def _set_chances(self, chances: FloatArray, decided: Ints, shared: Ints, now: float, horizon_s: float) -> None:
        segments = self._segments
        of_session = self.outlook.session_chance(segments.session[decided].astype(np.int64), now, horizon_s)
        chances[decided] = of_session * segments.share[decided]
        touched = segments.touched_s[shared]
        chances[shared] = self.outlook.touch_chance(segments.touch_class(shared), touched, now, horizon_s)
