"""Faults of the device while the NVMe tier runs: never wrong bytes, never more lost than must be, always counted."""

from __future__ import annotations

import errno
import logging
import threading
from pathlib import Path

import pytest
from tests.pools.blocks import LAYOUT, assert_blocks, nvme_pool, read_blocks, slots_of, write_blocks

from dflash2.errors import IntegrityError
from dflash2.pools.file_wrappers import (
    CorruptingFiles,
    FailingFiles,
    FileCall,
    GatedFiles,
    ShortFiles,
    When,
    payload_reads,
    payload_writes,
)
from dflash2.pools.fileops import FileOps, OsFileOps
from dflash2.pools.nvme import NvmeOptions, NvmePool
from dflash2.pools.nvme_io import PoolHealth
from dflash2.types import PAGE_BYTES


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def pool_over(path: Path, files: FileOps, clock: Clock | None = None) -> NvmePool:
    return nvme_pool(path, options=NvmeOptions(files=files, clock=clock or Clock()))


class Switch:
    """Chooses calls only while it is on."""

    def __init__(self, when: When) -> None:
        self.on = True
        self._when = when

    def __call__(self, call: FileCall) -> bool:
        return self.on and self._when(call)


def at_slot(slot: int) -> int:
    return PAGE_BYTES + slot * LAYOUT.stride_bytes


def test_no_space_in_the_middle_of_a_batch(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    full = Switch(lambda call: payload_writes(call) and call.offset + call.nbytes > at_slot(7))
    clock = Clock()
    pool = pool_over(tmp_path, FailingFiles(OsFileOps(), full, errno.ENOSPC), clock)
    with caplog.at_level(logging.WARNING):
        ok = write_blocks(pool, range(12), range(12))
        assert ok == [True] * 7 + [False] * 5
        assert pool.health is PoolHealth.FULL
        assert_blocks(pool, range(7), range(7))
        assert read_blocks(pool, range(7, 12)) == [None] * 5
        # While it is full nothing is tried, even where it would succeed.
        assert write_blocks(pool, [0], [500]) == [False]
    assert caplog.text.count("no space") == 1
    assert pool.fault_counts["no space"] == 1
    full.on = False
    clock.now += 6
    assert write_blocks(pool, [8, 9], [8, 9]) == [True, True]
    assert pool.health is PoolHealth.OK
    assert_blocks(pool, [8, 9, 1], [8, 9, 1])
    pool.check_integrity()
    pool.close()


def test_a_device_that_stays_full_is_probed_and_not_hammered(tmp_path: Path) -> None:
    tries = []

    def full(call: FileCall) -> bool:
        if payload_writes(call):
            tries.append(call.offset)
        return payload_writes(call)

    clock = Clock()
    pool = pool_over(tmp_path, FailingFiles(OsFileOps(), full, errno.EDQUOT), clock)
    for _ in range(50):
        write_blocks(pool, [0, 1, 2], [0, 1, 2])
        clock.now += 1
    assert 5 <= len(tries) <= 12
    pool.close()


@pytest.mark.parametrize("error", [errno.EIO, errno.EROFS, errno.EINVAL])
def test_a_write_error_costs_its_block_only(tmp_path: Path, error: int) -> None:
    pool = pool_over(tmp_path, FailingFiles(OsFileOps(), lambda c: payload_writes(c) and c.touches(at_slot(3)), error))
    assert write_blocks(pool, range(6), range(6)) == [True, True, True, False, True, True]
    assert read_blocks(pool, [3]) == [None]
    assert_blocks(pool, [0, 1, 2, 4, 5], [0, 1, 2, 4, 5])
    assert pool.fault_counts == {"write error": 1}
    assert pool.health is PoolHealth.OK
    pool.check_integrity()
    pool.close()


def test_a_failed_overwrite_leaves_neither_the_old_nor_the_new_block(tmp_path: Path) -> None:
    broken = Switch(payload_writes)
    broken.on = False
    pool = pool_over(tmp_path, FailingFiles(OsFileOps(), broken))
    write_blocks(pool, [3], [1])
    broken.on = True
    assert write_blocks(pool, [3], [2]) == [False]
    assert read_blocks(pool, [3]) == [None]
    pool.close()
    again = nvme_pool(tmp_path)
    assert len(again.recover().slots) == 0
    again.close()


@pytest.mark.parametrize("max_bytes", [512, 1024, 2048])
def test_short_writes_and_reads_are_continued(tmp_path: Path, max_bytes: int) -> None:
    short = ShortFiles(OsFileOps(), lambda call: call.is_payload and call.index % 2 == 0, max_bytes)
    pool = pool_over(tmp_path, short)
    assert all(write_blocks(pool, range(8), range(8)))
    assert_blocks(pool, range(8), range(8))
    assert pool.fault_counts == {}
    pool.close()


def test_a_write_of_nothing_fails_instead_of_looping(tmp_path: Path) -> None:
    pool = pool_over(tmp_path, ShortFiles(OsFileOps(), payload_writes, 0))
    assert write_blocks(pool, [0], [0]) == [False]
    pool.close()


def test_a_half_written_block_is_never_visible(tmp_path: Path) -> None:
    """The first half goes through, then the device fails."""
    short = ShortFiles(OsFileOps(), payload_writes, 2048)
    pool = pool_over(tmp_path, FailingFiles(short, lambda c: payload_writes(c) and c.nbytes < LAYOUT.stride_bytes))
    assert write_blocks(pool, [2], [2]) == [False]
    assert read_blocks(pool, [2]) == [None]
    pool.close()
    again = nvme_pool(tmp_path)
    assert len(again.recover().slots) == 0
    again.close()


def test_a_read_error_is_a_miss_for_good_and_quarantines_the_slot(tmp_path: Path) -> None:
    reads = []

    def bad(call: FileCall) -> bool:
        if payload_reads(call) and call.touches(at_slot(4)):
            reads.append(call)
            return True
        return False

    pool = pool_over(tmp_path, FailingFiles(OsFileOps(), bad))
    write_blocks(pool, range(8), range(8))
    found = read_blocks(pool, range(8))
    assert [block is None for block in found] == [slot == 4 for slot in range(8)]
    assert read_blocks(pool, [4]) == [None]
    assert len(reads) == 2, "once with its neighbours, once alone, and never again"
    assert pool.quarantined_slots.tolist() == [4]
    assert write_blocks(pool, [4], [4]) == [False]
    assert pool.fault_counts == {"read error": 1}
    pool.check_integrity()
    pool.close()
    again = nvme_pool(tmp_path)
    assert 4 not in again.recover().slots
    again.close()


def test_a_truncated_file_loses_what_was_cut_off_only(tmp_path: Path) -> None:
    pool = nvme_pool(tmp_path)
    write_blocks(pool, range(8), range(8))
    with (tmp_path / "rank0" / "data").open("r+b") as file:
        file.truncate(at_slot(5) + 512)
    found = read_blocks(pool, range(8))
    assert [block is None for block in found] == [slot >= 5 for slot in range(8)]
    assert pool.quarantined_slots.tolist() == [5, 6, 7]
    assert pool.fault_counts == {"short read": 3}
    assert_blocks(pool, range(5), range(5))
    pool.close()


def test_an_unlinked_file_serves_until_the_restart_and_then_is_empty(tmp_path: Path) -> None:
    pool = nvme_pool(tmp_path)
    write_blocks(pool, range(4), range(4))
    (tmp_path / "rank0" / "data").unlink()
    assert_blocks(pool, range(4), range(4))
    pool.close()
    again = nvme_pool(tmp_path)
    assert len(again.recover().slots) == 0
    again.close()


@pytest.mark.parametrize("position", [0, 511, LAYOUT.block_bytes - 1])
def test_a_flipped_bit_on_disk_is_a_checksum_failure(tmp_path: Path, position: int) -> None:
    pool = nvme_pool(tmp_path)
    write_blocks(pool, range(6), range(6))
    pool.close()
    with (tmp_path / "rank0" / "data").open("r+b") as file:
        file.seek(at_slot(2) + position)
        byte = file.read(1)[0]
        file.seek(at_slot(2) + position)
        file.write(bytes([byte ^ 4]))
    again = nvme_pool(tmp_path)
    found = read_blocks(again, range(6), range(6))
    assert [block is None for block in found] == [slot == 2 for slot in range(6)]
    assert again.checksum_failures == 1
    assert again.quarantined_slots.tolist() == [2]
    assert_blocks(again, [0, 1, 3, 4, 5], [0, 1, 3, 4, 5])
    again.check_integrity()
    again.close()


def test_a_bit_flipped_on_the_way_is_noticed(tmp_path: Path) -> None:
    pool = pool_over(tmp_path, CorruptingFiles(OsFileOps(), payload_reads))
    write_blocks(pool, [1], [1])
    assert read_blocks(pool, [1]) == [None]
    assert pool.checksum_failures == 1
    pool.close()


def test_blocks_exchanged_on_disk_are_noticed(tmp_path: Path) -> None:
    """Each payload is whole, but under the other's header."""
    pool = nvme_pool(tmp_path)
    write_blocks(pool, [1, 2], [1, 2])
    pool.close()
    path = tmp_path / "rank0" / "data"
    raw = bytearray(path.read_bytes())
    one, two, size = at_slot(1), at_slot(2), LAYOUT.stride_bytes
    raw[one : one + size], raw[two : two + size] = raw[two : two + size], raw[one : one + size]
    path.write_bytes(raw)
    again = nvme_pool(tmp_path)
    assert read_blocks(again, [1, 2]) == [None, None]
    assert again.checksum_failures == 2
    again.close()


def test_a_header_that_cannot_be_written_makes_no_block(tmp_path: Path) -> None:
    headers = Switch(lambda call: call.operation == "write" and not call.is_payload)
    pool = pool_over(tmp_path, FailingFiles(OsFileOps(), headers))
    assert write_blocks(pool, [1, 2], [1, 2]) == [False, False]
    assert read_blocks(pool, [1, 2]) == [None, None]
    headers.on = False
    assert write_blocks(pool, [1], [10]) == [True]
    headers.on = True
    # The old header cannot be taken back: the slot is given up rather than overwritten under it.
    assert write_blocks(pool, [1], [11]) == [False]
    assert read_blocks(pool, [1]) == [None]
    assert pool.quarantined_slots.tolist() == [1]
    pool.close()


def test_a_discard_that_the_disk_refuses_is_reported(tmp_path: Path) -> None:
    headers = Switch(lambda call: call.operation == "write" and not call.is_payload)
    headers.on = False
    pool = pool_over(tmp_path, FailingFiles(OsFileOps(), headers))
    write_blocks(pool, [1, 2], [1, 2])
    headers.on = True
    assert pool.discard(slots_of([1])).tolist() == [False]
    assert read_blocks(pool, [1]) == [None]
    assert pool.quarantined_slots.tolist() == [1]
    assert_blocks(pool, [2], [2])
    pool.close()


def test_a_thousand_failures_are_one_log_line(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    pool = pool_over(tmp_path, FailingFiles(OsFileOps(), payload_writes))
    with caplog.at_level(logging.WARNING):
        for _ in range(100):
            write_blocks(pool, range(10), range(10))
    assert len(caplog.records) == 1
    assert pool.fault_counts == {"write error": 1000}
    pool.close()


def test_close_while_a_write_hangs_keeps_the_descriptor(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Closed, its number could go to another file, and the late write with it."""
    gate = threading.Event()
    pool = pool_over(tmp_path, GatedFiles(OsFileOps(), payload_writes, gate))
    writer = threading.Thread(target=write_blocks, args=(pool, [1], [1]))
    writer.start()
    while not pool._in_flight:
        pass
    with caplog.at_level(logging.ERROR):
        pool.close()
    assert "still hang" in caplog.text
    gate.set()
    writer.join()
    assert_blocks(pool, [1], [1])
    pool.close()
    nvme_pool(tmp_path).close()


def test_integrity_check_finds_a_header_that_memory_does_not_know(tmp_path: Path) -> None:
    pool = nvme_pool(tmp_path)
    write_blocks(pool, [1], [1])
    pool.check_integrity()
    pool._headers._valid[1] = False
    with pytest.raises(IntegrityError, match="differ"):
        pool.check_integrity()
    pool.close()


def test_keys_guard_a_slot_that_was_reused(tmp_path: Path) -> None:
    pool = nvme_pool(tmp_path)
    write_blocks(pool, [1], [1])
    write_blocks(pool, [1], [2])
    assert read_blocks(pool, [1], [1]) == [None]
    assert read_blocks(pool, [1], [2])[0] is not None
    assert pool.quarantined_slots.tolist() == []
    pool.close()
