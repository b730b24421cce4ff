"""Which requests belong together: a conversation, an agent's loop, told from the blocks that they share.

A request continues the session of an earlier one when it repeats at least half of its blocks, not counting blocks that
many sessions have in common. A client that names its sessions helps where a chain breaks: a new chain of a known
session starts with that session's history.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

from dflash2.policy.gaps import GapModel, Wait

MAX_SESSIONS = 16_384
"""Sessions remembered; the one that has not come for longest is forgotten first."""
WIDELY_SHARED = 3
"""Sessions that must have a block in common before it says nothing about whose it is."""
SHORTEST_GAP_S = 0.05


@dataclass(slots=True)
class History:
    """Logarithms of past gaps: averages over the last few and over more, the last one, and their spread."""

    count: int = 0
    fast: float = 0.0
    slow: float = 0.0
    last: float = 0.0
    variance: float = 1.0

    def note(self, gap_s: float) -> None:
        value = math.log(max(gap_s, SHORTEST_GAP_S))
        if self.count:
            deviation = value - self.slow
            self.variance = 0.85 * self.variance + 0.15 * deviation * deviation
            self.fast += 0.5 * (value - self.fast)
            self.slow += 0.15 * deviation
        else:
            self.fast = self.slow = value
        self.last = value
        self.count += 1

    def copy(self) -> History:
        return History(self.count, self.fast, self.slow, self.last, self.variance)


@dataclass(slots=True, eq=False)
class Session:
    """One chain of requests.

    Attributes:
        row: index in the arrays of whoever keeps figures by session.
        turns: requests so far.
        keys: identity of the blocks of the last request.
        arrived_s, finished_s: of the last request; ``finished_s`` is None while it runs.
        idle: gaps between the end of a request and the next one's arrival.
        paced: gaps between arrivals.
        by_stop: as ``idle``, by the stop reason of the request before.
        last_stop: number of the last known stop reason; 0 for none.
        running, waiting: the waits that go on, each with its model.
        segments: what its last request used and has not been given to others since.
    """

    row: int
    name: str | None = None
    turns: int = 0
    keys: Sequence[Hashable] = ()
    arrived_s: float = 0.0
    finished_s: float | None = None
    idle: History = field(default_factory=History)
    paced: History = field(default_factory=History)
    by_stop: dict[int, History] = field(default_factory=dict)
    last_stop: int = 0
    running: tuple[GapModel, Wait] | None = None
    waiting: tuple[GapModel, Wait] | None = None
    segments: list[int] = field(default_factory=list)
    marks: list[Hashable] = field(default_factory=list)


class SessionIndex:
    """Finds the session that a request continues; remembers a bounded number of them."""

    def __init__(self) -> None:
        self._by_row: OrderedDict[int, Session] = OrderedDict()
        self._owner: dict[Hashable, Session] = {}
        self._spread: OrderedDict[Hashable, tuple[int, int]] = OrderedDict()
        """Of blocks at a few positions: the row of the session that came last and how many have come."""
        self._by_name: dict[str, Session] = {}
        self._free_rows = list(range(MAX_SESSIONS, -1, -1))

    def __len__(self) -> int:
        return len(self._by_row)

    def find(self, keys: Sequence[Hashable], name: str | None) -> tuple[Session, int, Session | None]:
        """The session that a prompt belongs to, a new one if need be.

        Args:
            keys: identity of the prompt's blocks, in order; equal keys have equal predecessors.
            name: the client's name for the session, if it gave one.

        Returns:
            The session, how many leading blocks its last request had too, and the session forgotten for a new one.
        """
        num_shared = self._num_widely_shared(keys)
        session = None
        for position in range(len(keys) - 1, num_shared - 1, -1):
            owner = self._owner.get(keys[position])
            if owner is not None and 2 * (position + 1) >= len(owner.keys):
                session = owner
                break
        forgotten = None
        if session is None:
            if len(self._by_row) >= MAX_SESSIONS:
                forgotten = self._forget_oldest()
            session = self._new(name)
        else:
            self._by_row.move_to_end(session.row)
        if name is not None:
            self._by_name[name] = session
        common = _common_prefix(session.keys, keys)
        self._mark(session, keys)
        self._count_spread(session, keys)
        session.keys = keys
        return session, common, forgotten

    def _new(self, name: str | None) -> Session:
        session = Session(self._free_rows.pop(), name)
        elder = None if name is None else self._by_name.get(name)
        if elder is not None:
            session.idle, session.paced = elder.idle.copy(), elder.paced.copy()
            session.by_stop = {stop: history.copy() for stop, history in elder.by_stop.items()}
        self._by_row[session.row] = session
        return session

    def _forget_oldest(self) -> Session:
        row, session = self._by_row.popitem(last=False)
        self._unmark(session)
        if session.name is not None and self._by_name.get(session.name) is session:
            del self._by_name[session.name]
        self._free_rows.append(row)
        return session

    def _mark(self, session: Session, keys: Sequence[Hashable]) -> None:
        """Register the blocks by which the session is found: the last three and those at a half and three quarters."""
        self._unmark(session)
        count = len(keys)
        places = {count - 1, count - 2, count - 3, 3 * count // 4, (count + 1) // 2 - 1}
        session.marks = [keys[place] for place in places if 0 <= place < count]
        for key in session.marks:
            self._owner[key] = session

    def _unmark(self, session: Session) -> None:
        for key in session.marks:
            if self._owner.get(key) is session:
                del self._owner[key]

    def _num_widely_shared(self, keys: Sequence[Hashable]) -> int:
        """How many leading blocks are known to be common to many sessions."""
        depth, position = 0, 0
        while position < len(keys):
            if self._spread.get(keys[position], (0, 0))[1] < WIDELY_SHARED:
                break
            depth = position + 1
            position = 2 * position + 1
        return depth

    def _count_spread(self, session: Session, keys: Sequence[Hashable]) -> None:
        position = 0
        while position < len(keys):
            key = keys[position]
            last, count = self._spread.get(key, (session.row, 0))
            if not count or last != session.row:
                self._spread[key] = (session.row, count + 1)
                self._spread.move_to_end(key)
            position = 2 * position + 1
        while len(self._spread) > 8 * MAX_SESSIONS:
            self._spread.popitem(last=False)


def _common_prefix(one: Sequence[Hashable], other: Sequence[Hashable]) -> int:
    """Leading keys that are equal; where two keys are, so are all before them."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if one[middle - 1] == other[middle - 1]:
            low = middle
        else:
            high = middle - 1
    return low
