from __future__ import annotations

import itertools
import threading

import pytest

from dflash2.errors import CapacityError
from dflash2.transfer.staging import StagingBuffer
from dflash2.types import PAGE_BYTES


def test_takes_only_what_can_be_in_use() -> None:
    staging = StagingBuffer(1 << 30, batch_blocks=2, stride_bytes=PAGE_BYTES)
    assert staging.nbytes == 4 * 2 * PAGE_BYTES
    assert staging.chunk_blocks == 2


@pytest.mark.parametrize(
    ("fits", "num_chunks", "chunk_blocks"), [(1, 1, 1), (3, 3, 1), (4, 4, 1), (11, 4, 2), (400, 4, 32)]
)
def test_a_small_budget_makes_smaller_chunks(fits: int, num_chunks: int, chunk_blocks: int) -> None:
    staging = StagingBuffer(fits * PAGE_BYTES + 100, 32, PAGE_BYTES)
    assert staging.chunk_blocks == chunk_blocks
    assert staging.nbytes == num_chunks * chunk_blocks * PAGE_BYTES
    chunks = [staging.try_acquire() for _ in range(num_chunks)]
    assert None not in chunks
    assert staging.try_acquire() is None
    assert staging.in_use_bytes == staging.peak_bytes == staging.nbytes


def test_a_budget_below_one_block_is_refused() -> None:
    with pytest.raises(CapacityError, match="does not hold one block"):
        StagingBuffer(PAGE_BYTES - 1, 32, PAGE_BYTES)


def test_chunks_are_page_aligned_and_apart() -> None:
    staging = StagingBuffer(1 << 20, 3, PAGE_BYTES)
    chunks = [staging.try_acquire() for _ in range(4)]
    starts = sorted(chunk.rows.ctypes.data for chunk in chunks if chunk is not None)
    assert all(start % PAGE_BYTES == 0 for start in starts)
    assert all(b - a >= 3 * PAGE_BYTES for a, b in itertools.pairwise(starts))


def test_waiting_has_a_deadline() -> None:
    staging = StagingBuffer(PAGE_BYTES, 1, PAGE_BYTES)
    assert staging.acquire(0.0) is not None
    assert staging.acquire(0.0) is None
    assert staging.acquire(0.01) is None
    staging.check_integrity(1)


def test_first_come_first_served() -> None:
    staging = StagingBuffer(PAGE_BYTES, 1, PAGE_BYTES)
    held = staging.try_acquire()
    assert held is not None
    served: list[int] = []

    def want(number: int) -> None:
        chunk = staging.acquire(30.0)
        assert chunk is not None
        served.append(number)
        staging.release(chunk)

    threads = []
    for number in range(4):
        threads.append(threading.Thread(target=want, args=(number,)))
        threads[-1].start()
        while len(staging._waiting) <= number:
            pass
    assert staging.try_acquire() is None
    staging.release(held)
    for thread in threads:
        thread.join()
    assert served == [0, 1, 2, 3]
    staging.check_integrity(0)


def test_somebody_who_gave_up_does_not_block_the_line() -> None:
    staging = StagingBuffer(PAGE_BYTES, 1, PAGE_BYTES)
    held = staging.try_acquire()
    assert held is not None
    assert staging.acquire(0.01) is None
    staging.release(held)
    assert staging.try_acquire() is not None
