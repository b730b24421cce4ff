"""The fewest writes to NVMe with which so many hits can be had by one who knows the future. For reports only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from dflash2.replay.classical.opt import NEVER, next_uses
from dflash2.types import IntArray

SEARCH_STEPS = 8
"""Halvings of the search for the shortest distance; each is a run over the whole trace."""


@dataclass(frozen=True, slots=True)
class Foreseen:
    """What one run gave.

    Attributes:
        in_memory: int64 ``[requests]``, leading blocks found in HBM or DRAM.
        on_nvme: int64 ``[requests]``, leading blocks found on NVMe.
        num_writes: blocks written to NVMe.
    """

    in_memory: npt.NDArray[np.int64]
    on_nvme: npt.NDArray[np.int64]
    num_writes: int

    @property
    def num_hits(self) -> int:
        return int(self.in_memory.sum() + self.on_nvme.sum())


def fewest_writes(requests: Sequence[IntArray], memory: int, nvme: int, wanted_hits: int) -> Foreseen:
    """Writes only blocks whose next use is near enough, for the smallest distance that gives ``wanted_hits``.

    Memory and NVMe each give up what is used latest. It is not proven to be the minimum, but near: a block is written
    once at most as long as it has a use to come.

    Args:
        requests: int32 ``[n]`` each, distinct blocks, numbered from 0.
        memory: blocks of HBM and DRAM together.
        nvme: blocks of NVMe.
        wanted_hits: to be reached, if that is possible at all.
    """
    following = next_uses(requests)
    best = _run(requests, following, memory, nvme, NEVER)
    low, high = 0, len(following)
    for _ in range(SEARCH_STEPS):
        if best.num_hits <= wanted_hits:
            break
        middle = (low + high) // 2
        run = _run(requests, following, memory, nvme, middle)
        if run.num_hits >= wanted_hits:
            best, high = run, middle
        else:
            low = middle
    return best


def _run(
    requests: Sequence[IntArray], following: npt.NDArray[np.int64], memory: int, nvme: int, farthest: int
) -> Foreseen:
    num_blocks = 1 + max((int(blocks.max()) for blocks in requests if len(blocks)), default=-1)
    next_use = np.full(num_blocks, NEVER, np.int64)
    """Of blocks that are held; NEVER for all others."""
    in_memory, on_nvme = np.zeros(num_blocks, np.bool_), np.zeros(num_blocks, np.bool_)
    found = np.zeros((2, len(requests)), np.int64)
    num_writes = start = 0
    for number, blocks in enumerate(requests):
        absent = np.flatnonzero(next_use[blocks] == NEVER)
        there = blocks[: absent[0]] if len(absent) else blocks
        found[0, number] = np.count_nonzero(in_memory[there])
        found[1, number] = len(there) - found[0, number]
        start += len(blocks)
        next_use[blocks] = following[start - len(blocks) : start]
        useful = next_use[blocks] != NEVER
        in_memory[blocks] = useful
        on_nvme[blocks] &= useful
        leaving = _latest(in_memory, next_use, memory)
        in_memory[leaving] = False
        new = leaving[~on_nvme[leaving]]
        new = new[next_use[new] - start <= farthest]
        on_nvme[new] = True
        dropped = _latest(on_nvme, next_use, nvme)
        on_nvme[dropped] = False
        num_writes += int(np.count_nonzero(on_nvme[new]))
        for gone in (leaving, dropped):
            next_use[gone[~in_memory[gone] & ~on_nvme[gone]]] = NEVER
    return Foreseen(found[0], found[1], num_writes)


def _latest(held: npt.NDArray[np.bool_], next_use: npt.NDArray[np.int64], capacity: int) -> npt.NDArray[np.int64]:
    """Of the blocks held, those beyond ``capacity`` that are used latest."""
    ids = np.flatnonzero(held)
    surplus = len(ids) - capacity
    if surplus <= 0:
        return ids[:0]
    return ids[np.argpartition(next_use[ids], len(ids) - surplus)[-surplus:]]
