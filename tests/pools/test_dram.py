from __future__ import annotations

import resource
from pathlib import Path

import numpy as np
import pytest
from tests.pools.blocks import LAYOUT, payload, write_blocks

from dflash2.errors import CapacityError
from dflash2.pools.base import HostAddressable
from dflash2.pools.dram import DramPool
from dflash2.pools.page_memory import PageMemory
from dflash2.types import PAGE_BYTES, KVLayout, Tier

ODD = KVLayout(num_layers=3, num_kv_heads=1, head_dim=7, block_size=1031, dtype="bfloat16")
"""86,604 bytes: 22 pages less a bit."""


def resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()


def test_slabs_are_the_slots_and_page_aligned() -> None:
    pool = DramPool(8, LAYOUT)
    assert isinstance(pool, HostAddressable)
    write_blocks(pool, [3], [7])
    assert pool.slabs.shape == (8, LAYOUT.stride_bytes)
    assert pool.slabs.flags.c_contiguous
    assert pool.slabs.ctypes.data % PAGE_BYTES == 0
    assert np.array_equal(pool.slabs[3, : LAYOUT.block_bytes], payload(7))


def test_takes_exactly_what_was_asked_and_all_of_it_at_start() -> None:
    num_slots = 701  # about 60 MB; a power of two would be 67 MB
    before = resident_bytes()
    pool = DramPool(num_slots, ODD)
    grown = resident_bytes() - before
    asked = num_slots * ODD.stride_bytes
    assert pool.nbytes == asked
    assert asked * 0.98 <= grown <= asked + 4 * 1024 * 1024
    pool.close()
    assert resident_bytes() - before < 8 * 1024 * 1024


def test_more_than_there_is_fails_at_start() -> None:
    with pytest.raises(CapacityError, match="cannot map"):
        PageMemory(1 << 62)


def test_no_slots_is_a_pool_of_nothing() -> None:
    pool = DramPool(0, LAYOUT)
    assert pool.tier is Tier.DRAM
    assert pool.slabs.shape == (0, LAYOUT.stride_bytes)


class Locker:
    def __init__(self, fails_at: int | None = None) -> None:
        self.ranges: list[tuple[int, int]] = []
        self.fails_at = fails_at

    def __call__(self, address: int, nbytes: int):
        if len(self.ranges) == self.fails_at:
            raise CapacityError("the device refuses to lock more")
        self.ranges.append((address, nbytes))
        return lambda: self.ranges.remove((address, nbytes))


def test_pages_are_locked_in_chunks_without_gap_and_unlocked_at_close() -> None:
    locker = Locker()
    memory = PageMemory(10 * PAGE_BYTES + 1, locker, lock_chunk_bytes=4 * PAGE_BYTES)
    base = memory.bytes.ctypes.data
    assert [(address - base, size) for address, size in locker.ranges] == [
        (0, 4 * PAGE_BYTES),
        (4 * PAGE_BYTES, 4 * PAGE_BYTES),
        (8 * PAGE_BYTES, 3 * PAGE_BYTES),
    ]
    memory.close()
    assert locker.ranges == []


def test_a_refused_lock_undoes_those_before() -> None:
    locker = Locker(fails_at=2)
    with pytest.raises(CapacityError, match="refuses"):
        PageMemory(10 * PAGE_BYTES, locker, lock_chunk_bytes=4 * PAGE_BYTES)
    assert locker.ranges == []
