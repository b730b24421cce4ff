"""What requests in SGLang's queue will find below HBM, and its way up from NVMe while they wait."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, replace

import numpy as np

from dflash2.cache.manager import CacheManager
from dflash2.integrations.sglang.holds import Holds
from dflash2.table.page_table import TIER_BIT
from dflash2.types import IntArray, Tier, Urgency

FRONT_SHARE = 0.75
"""Share of DRAM that blocks which requests wait for may take."""

EMPTY: IntArray = np.empty(0, np.int32)


@dataclass(frozen=True, slots=True)
class Restorable:
    """What of a prompt's tail lies below HBM.

    Attributes:
        ids: int32 ``[n]``, the leading blocks with a copy in DRAM or on NVMe.
        num_ready: how many of them, from the first on, are in DRAM and can be loaded at once.
    """

    ids: IntArray
    num_ready: int


@dataclass(frozen=True, slots=True)
class _Expected:
    """What a waiting request will use from below HBM.

    Attributes:
        ids: the blocks.
        on_nvme: those of them that were nowhere else when it arrived.
        held: those that stay in DRAM until the request has got them.
    """

    ids: IntArray
    on_nvme: IntArray
    held: IntArray


class Expectations:
    """One entry per waiting request, in the order of arrival.

    Args:
        cache: the manager whose blocks are meant.
        clock: time of decisions.
        holds: keeps blocks in DRAM.
    """

    def __init__(self, cache: CacheManager, clock: Callable[[], float], holds: Holds) -> None:
        self._cache = cache
        self._table = cache.table
        self._clock = clock
        self._holds = holds
        self._expected: dict[str, _Expected] = {}
        self._num_waiting = np.zeros(len(self._table.next_use), np.int32)
        """Requests that wait for each block."""

    def restorable(self, request_id: str, keys: list[bytes]) -> Restorable:
        """Which leading blocks of ``keys`` can be had from below. They stay hot until ``forget``."""
        ids = self._cache.index.longest_prefix(keys)
        below = (self._table.present[ids] & ~TIER_BIT[Tier.HBM]) != 0
        ids = ids[: _leading(below)]
        before = self._expected.get(request_id)
        if len(ids):
            on_nvme = ids[self._table.present[ids] == TIER_BIT[Tier.NVME]] if before is None else before.on_nvme
            held = EMPTY if before is None else self._kept(before.held, ids)
            self._expected[request_id] = _Expected(ids, on_nvme, held)  # keeps its place in the line
            self._num_waiting[ids] += 1
            self._table.next_use[ids] = self._clock()
            if before is not None:
                self._no_longer_for(before.ids)
        else:
            self.forget(request_id)
        return Restorable(ids, _leading(self._table.has(ids, Tier.DRAM)))

    def num_blocks(self, request_id: str) -> int:
        """Blocks that ``restorable`` found for a waiting request, in DRAM or on NVMe."""
        expected = self._expected.get(request_id)
        return 0 if expected is None else len(expected.ids)

    def on_nvme(self, request_id: str) -> IntArray:
        """Blocks that were on NVMe only when the request arrived."""
        expected = self._expected.get(request_id)
        return EMPTY if expected is None else expected.on_nvme

    def in_front(self, request_id: str) -> bool:
        """Whether this request's blocks, and those of all that were expected before it, fit DRAM together.

        If all that wait brought theirs up at once, they would push each other's out again before anybody used them.
        """
        room = int(FRONT_SHARE * self._table.capacity(Tier.DRAM))
        for index, (other, expected) in enumerate(self._expected.items()):
            room -= len(expected.ids)
            if other == request_id:
                return index == 0 or room >= 0
            if room < 0:
                return False
        return True

    def bring_up(self, request_id: str) -> None:
        """Begin to bring a request's blocks from NVMe to DRAM, as far as there is room.

        Those that are in DRAM stay there until it has got them: they have another copy, and would be the first to make
        room for the rest.
        """
        expected = self._expected.get(request_id)
        if expected is None:
            return
        table = self._table
        in_dram = table.has(expected.ids, Tier.DRAM)
        there = np.setdiff1d(expected.ids[in_dram], expected.held)
        self._holds.hold(there)
        self._expected[request_id] = replace(expected, held=np.concatenate([expected.held, there]))
        away = expected.ids[~in_dram & table.has(expected.ids, Tier.NVME) & (table.arriving[expected.ids] == 0)]
        if len(away):
            self._cache.room.make(Tier.DRAM, len(away), self._clock())
            self._cache.mover.copy(away, Tier.NVME, Tier.DRAM, Urgency.DEMAND)

    def forget(self, request_id: str) -> None:
        """The request has got its blocks, or will never want them. Idempotent."""
        expected = self._expected.pop(request_id, None)
        if expected is not None:
            self._no_longer_for(expected.ids)
            self._holds.let_go(expected.held)

    def forget_others(self, waiting: Collection[str]) -> None:
        """Only these requests wait still."""
        still = set(waiting)
        for request_id in [each for each in self._expected if each not in still]:
            self.forget(request_id)

    def _no_longer_for(self, ids: IntArray) -> None:
        """One request fewer waits for these blocks; those that nobody waits for are like any others."""
        self._num_waiting[ids] -= 1
        self._table.next_use[ids[self._num_waiting[ids] == 0]] = np.inf

    def _kept(self, held: IntArray, ids: IntArray) -> IntArray:
        """Let those go that are no longer among ``ids``, because they are on the device by now; the others."""
        wanted = np.isin(held, ids)
        self._holds.let_go(held[~wanted])
        return held[wanted]


def _leading(flags: np.ndarray) -> int:
    """How many values are True before the first that is not."""
    wrong = np.flatnonzero(~flags)
    return int(wrong[0]) if len(wrong) else len(flags)
