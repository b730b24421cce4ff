"""Does heat mean what it says? Of blocks with a heat of 0.7 seven in ten should be used within the horizon."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from dflash2.types import FloatArray, IntArray

NUM_BINS = 10
SAMPLE_EVERY = 100
"""Requests between two samples."""
SAMPLE_BLOCKS = 4096
SEED = 0


@dataclass(frozen=True, slots=True)
class Bin:
    """Blocks whose heat was in one tenth of [0, 1].

    Attributes:
        heat: their mean heat.
        share_used: of them, used within the horizon.
        num_blocks: how many were looked at.
    """

    heat: float
    share_used: float
    num_blocks: int


@dataclass(frozen=True, slots=True)
class _Sample:
    numbers: IntArray
    heat: FloatArray
    taken_s: float
    until_s: float


class HeatSampler:
    """Notes the heat of some blocks now and then and looks later what became of them."""

    def __init__(self) -> None:
        self._pending: deque[_Sample] = deque()
        self._last_use = np.full(1024, -np.inf)
        self._heat = np.zeros(NUM_BINS)
        self._used = np.zeros(NUM_BINS, np.int64)
        self._count = np.zeros(NUM_BINS, np.int64)
        self._random = np.random.default_rng(SEED)

    def is_due(self, request_number: int) -> bool:
        """A sample should be taken after this request."""
        return request_number % SAMPLE_EVERY == SAMPLE_EVERY - 1

    def take(self, numbers: IntArray, heat: FloatArray, now: float, horizon_s: float) -> None:
        """Note the heat of blocks (int32 ``[n]``, numbers of the trace) that will be judged in ``horizon_s``."""
        if len(numbers) > SAMPLE_BLOCKS:
            chosen = self._random.choice(len(numbers), SAMPLE_BLOCKS, replace=False)
            numbers, heat = numbers[chosen], heat[chosen]
        self._pending.append(_Sample(numbers.copy(), heat.copy(), now, now + horizon_s))

    def note_use(self, numbers: IntArray, now: float) -> None:
        """These blocks are used; told of every request."""
        self._judge(now)
        last = int(numbers.max(initial=0))
        if last >= len(self._last_use):
            self._last_use = np.concatenate([self._last_use, np.full(last + 1, -np.inf)])
        self._last_use[numbers] = now

    def bins(self) -> list[Bin]:
        """Every tenth that has blocks. Those whose horizon has not passed are not counted."""
        return [
            Bin(float(heat / count), float(used / count), int(count))
            for heat, used, count in zip(self._heat, self._used, self._count, strict=True)
            if count
        ]

    def _judge(self, now: float) -> None:
        """The horizons differ, so a later sample may be judged before an earlier one."""
        for _ in range(len(self._pending)):
            sample = self._pending.popleft()
            if sample.until_s >= now:
                self._pending.append(sample)
                continue
            used: npt.NDArray[np.bool_] = self._last_use[sample.numbers] > sample.taken_s
            tenth = np.minimum((sample.heat * NUM_BINS).astype(np.int64), NUM_BINS - 1)
            self._heat += np.bincount(tenth, sample.heat, NUM_BINS)
            self._used += np.bincount(tenth, used, NUM_BINS).astype(np.int64)
            self._count += np.bincount(tenth, minlength=NUM_BINS)
