"""One native call does what goes well, exactly as Python would; what does not go well is Python's to report."""

from __future__ import annotations

import ctypes
import errno
import logging
import os
import resource
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import xxhash
from tests.pools.blocks import (
    LAYOUT,
    NUM_SLOTS,
    assert_blocks,
    new_rows,
    nvme_pool,
    python_nvme_pool,
    read_blocks,
    striped_nvme_pool,
    write_blocks,
)
from tests.pools.payloads import slots_of

from dflash2.pools import native_blocks as module
from dflash2.pools.native_blocks import BlockBatch, BlockState, NativeBlocks, native_blocks
from dflash2.pools.native_rows import LIBRARY
from dflash2.pools.nvme import NvmePool
from dflash2.pools.nvme_format import HEADER_BYTES, HEADER_DTYPE, new_headers, pack_header
from dflash2.pools.nvme_io import PoolHealth
from dflash2.pools.nvme_native import NativePayloadIo
from dflash2.types import PAGE_BYTES, IntArray

STRIDE, PAYLOAD = LAYOUT.stride_bytes, LAYOUT.block_bytes


@pytest.fixture(scope="module")
def library() -> NativeBlocks:
    if not LIBRARY.exists():
        pytest.skip("the package was installed without a C compiler: there is no native I/O")
    return NativeBlocks()


@pytest.fixture
def pool(library: NativeBlocks, tmp_path: Path) -> Iterator[NvmePool]:
    pool = nvme_pool(tmp_path)
    assert isinstance(pool._io, NativePayloadIo)
    yield pool
    pool.close()


@pytest.fixture
def descriptor(tmp_path: Path) -> Iterator[int]:
    """A file with room for the superblock's page and ``NUM_SLOTS`` blocks, open with buffers."""
    fd = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
    os.ftruncate(fd, at(NUM_SLOTS))
    yield fd
    os.close(fd)


def at(slot: int) -> int:
    return PAGE_BYTES + slot * STRIDE


def batch_of(rows: list[int], fd: int, slots: list[int], max_run: int = 4, num_threads: int = 1) -> BlockBatch:
    """Those rows of five, at those slots of a file."""
    buffer = new_rows(5)
    buffer[:] = np.random.default_rng(7).integers(0, 256, buffer.shape, dtype=np.uint8)
    files = np.full(len(rows), fd)
    return BlockBatch(
        buffer, np.array(rows), files, np.array([at(slot) for slot in slots]), PAYLOAD, max_run, num_threads
    )


def header_store(
    library: NativeBlocks, batch: BlockBatch, fd: int, stale: list[int], slots: list[int]
) -> tuple[bool, np.ndarray[tuple[int], np.dtype[np.void]]]:
    headers = new_headers(np.full((len(slots), 32), 9, dtype=np.uint8), 40, PAYLOAD)
    return library.store(batch, fd, slots_of(stale), slots_of(slots), headers), headers


@pytest.mark.parametrize(("max_run", "num_threads"), [(1, 1), (2, 1), (100, 1), (1, 3), (1, 100), (2, 2), (2, 0)])
def test_stores_payloads_and_headers_byte_for_byte(
    library: NativeBlocks, descriptor: int, tmp_path: Path, max_run: int, num_threads: int
) -> None:
    index = os.open(tmp_path / "index", os.O_RDWR | os.O_CREAT)
    os.pwrite(index, b"\xff" * (NUM_SLOTS * HEADER_BYTES), PAGE_BYTES)
    slots = [3, 4, 5, 8]
    batch = batch_of([4, 0, 2, 1], descriptor, slots, max_run, num_threads)
    done, _ = header_store(library, batch, index, [2, 3, 4, 9], slots)
    buffer = batch._kept[0]
    assert done and batch.states.tolist() == [BlockState.DONE] * 4
    for i, (row, slot) in enumerate(zip([4, 0, 2, 1], slots, strict=True)):
        assert os.pread(descriptor, STRIDE, at(slot)) == buffer[row].tobytes()
        checksum = xxhash.xxh3_64_intdigest(buffer[row, :PAYLOAD].tobytes())
        assert batch.checksums[i] == checksum
        wanted = pack_header(bytes([9]) * 32, checksum, 40 + i, PAYLOAD)
        assert os.pread(index, HEADER_BYTES, PAGE_BYTES + slot * HEADER_BYTES) == wanted
    for slot in range(NUM_SLOTS):  # stale ones are empty, the others as they were
        found = os.pread(index, HEADER_BYTES, PAGE_BYTES + slot * HEADER_BYTES)
        if slot not in slots:
            assert found == (bytes(HEADER_BYTES) if slot in (2, 9) else b"\xff" * HEADER_BYTES)
            assert os.pread(descriptor, STRIDE, at(slot)) == bytes(STRIDE)
    os.close(index)


def test_headers_are_complete_whatever_the_order_of_slots(
    library: NativeBlocks, descriptor: int, tmp_path: Path
) -> None:
    """Striped slots come part by part, so their headers are not in order."""
    index = os.open(tmp_path / "index", os.O_RDWR | os.O_CREAT)
    slots = [0, 2, 4, 1, 3]
    batch = batch_of([0, 1, 2, 3, 4], descriptor, [0, 1, 2, 8, 9])
    assert header_store(library, batch, index, [], slots)[0]
    raw = np.frombuffer(os.pread(index, 5 * HEADER_BYTES, PAGE_BYTES), dtype=HEADER_DTYPE)
    assert raw["checksum"].tolist() == [int(batch.checksums[slots.index(slot)]) for slot in range(5)]
    assert raw["generation"].tolist() == [40 + slots.index(slot) for slot in range(5)]
    os.close(index)


def test_loads_until_the_file_ends_and_leaves_the_rest_alone(library: NativeBlocks, descriptor: int) -> None:
    data = np.random.default_rng(1).integers(0, 256, 5 * STRIDE, dtype=np.uint8).tobytes()
    os.pwrite(descriptor, data, at(0))
    os.ftruncate(descriptor, at(3) + 100)
    batch = batch_of([2, 0, 4, 1], descriptor, [0, 1, 2, 3], max_run=2)
    before = batch._kept[0].copy()
    library.load(batch)
    assert batch.states.tolist() == [BlockState.MOVED] * 2 + [BlockState.NOTHING] * 2
    buffer = batch._kept[0]
    for i, row in enumerate([2, 0]):
        block = data[i * STRIDE : (i + 1) * STRIDE]
        assert buffer[row].tobytes() == block
        assert batch.checksums[i] == xxhash.xxh3_64_intdigest(block[:PAYLOAD])
    assert np.array_equal(buffer[3], before[3])


def test_a_row_that_is_not_there_is_refused_before_anything_moves(library: NativeBlocks, descriptor: int) -> None:
    for row in (5, -1):
        with pytest.raises(IndexError):
            library.load(batch_of([0, row], descriptor, [0, 1]))
        with pytest.raises(IndexError):
            header_store(library, batch_of([0, row], descriptor, [0, 1]), descriptor, [0], [0, 1])
    assert os.pread(descriptor, at(2), 0) == bytes(at(2))


def test_arguments_that_do_not_fit_together_are_refused(library: NativeBlocks, descriptor: int) -> None:
    one = np.zeros(1, dtype=np.int64)
    with pytest.raises(ValueError, match="contiguous rows"):
        BlockBatch(new_rows(4)[::2], one, one, one, PAYLOAD, 1, 1)
    with pytest.raises(ValueError, match="0 offsets"):
        BlockBatch(new_rows(4), one, one, one[:0], PAYLOAD, 1, 1)
    with pytest.raises(ValueError, match="bytes"):
        BlockBatch(new_rows(4), one, one, one, STRIDE + 1, 1, 1)
    with pytest.raises(ValueError, match="a slot and a header"):
        header_store(library, batch_of([0], descriptor, [0]), descriptor, [], [0, 1])
    fixed = new_rows(4)
    fixed.flags.writeable = False
    with pytest.raises(ValueError, match="read-only"):
        library.load(BlockBatch(fixed, one, one, one, PAYLOAD, 1, 1))


def test_what_native_code_wrote_python_reads_and_the_other_way_round(library: NativeBlocks, tmp_path: Path) -> None:
    for writer, reader in ((nvme_pool, python_nvme_pool), (python_nvme_pool, nvme_pool)):
        folder = tmp_path / writer.__name__
        folder.mkdir()
        first = writer(folder)
        assert all(write_blocks(first, range(8), range(100, 108)))
        first.close()
        second = reader(folder)
        assert isinstance(second, NvmePool)
        assert second.recover().slots.tolist() == list(range(8))
        assert_blocks(second, range(8), range(100, 108))
        second.check_integrity()
        second.close()


def limit_file_size(nbytes: int) -> None:
    """Writes beyond are short, then fail with EFBIG; Python ignores the signal."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))


def test_a_block_that_cannot_be_written_fails_alone(pool: NvmePool) -> None:
    write_blocks(pool, range(8), range(8))
    limit_file_size(at(5) + 512)
    try:
        assert write_blocks(pool, range(8), range(50, 58)) == [True] * 5 + [False] * 3
    finally:
        limit_file_size(resource.RLIM_INFINITY)
    assert pool.fault_counts == {"write error": 3}
    assert read_blocks(pool, [5, 6, 7]) == [None] * 3
    assert_blocks(pool, range(5), range(50, 55))
    pool.check_integrity()
    assert write_blocks(pool, [5, 6], [5, 6]) == [True, True]


def test_a_full_device_is_full_also_natively(pool: NvmePool) -> None:
    device = os.open("/dev/full", os.O_RDWR)
    (data,) = pool._files.data_fds
    saved = os.dup(data)
    os.dup2(device, data)
    assert write_blocks(pool, range(4), range(4)) == [False] * 4
    assert (pool.health, pool.fault_counts) == (PoolHealth.FULL, {"no space": 1})
    os.dup2(saved, data)
    for fd in (saved, device):
        os.close(fd)
    pool._io._next_probe = 0.0
    assert write_blocks(pool, range(4), range(4)) == [True] * 4
    assert (pool.health, pool.num_quarantined) == (PoolHealth.OK, 0)
    assert_blocks(pool, range(4), range(4))


def test_an_index_that_takes_nothing_makes_no_block_and_gives_up_what_it_promises(pool: NvmePool) -> None:
    write_blocks(pool, [1], [1])
    index = pool._files.index_fd
    saved, device = os.dup(index), os.open("/dev/full", os.O_RDWR)
    os.dup2(device, index)
    assert write_blocks(pool, [1, 2], [11, 12]) == [False, False]
    os.dup2(saved, index)
    for fd in (saved, device):
        os.close(fd)
    assert pool.quarantined_slots.tolist() == [1], "its header still stands over whatever its payload is"
    assert read_blocks(pool, [1, 2]) == [None, None]
    assert write_blocks(pool, [1, 2], [21, 22]) == [False, True]
    pool.check_integrity()


def test_an_error_of_the_device_is_named(pool: NvmePool, caplog: pytest.LogCaptureFixture) -> None:
    write_blocks(pool, range(4), range(4))
    (data,) = pool._files.data_fds
    saved, other = os.dup(data), os.open("/", os.O_RDONLY)
    os.dup2(other, data)
    with caplog.at_level(logging.WARNING):
        assert read_blocks(pool, range(4)) == [None] * 4
    assert os.strerror(errno.EISDIR) in caplog.text
    assert pool.fault_counts == {"read error": 4} and pool.num_quarantined == 4
    os.dup2(saved, data)
    for fd in (saved, other):
        os.close(fd)


def test_one_bad_file_of_several_costs_its_blocks_only(library: NativeBlocks, tmp_path: Path) -> None:
    pool = striped_nvme_pool(tmp_path)
    assert isinstance(pool, NvmePool)
    write_blocks(pool, range(9), range(9))
    os.truncate(tmp_path / "b" / "rank0" / "data", PAGE_BYTES)
    found = read_blocks(pool, range(9))
    assert [block is None for block in found] == [slot % 3 == 1 for slot in range(9)]
    assert pool.fault_counts == {"short read": 3}
    assert write_blocks(pool, [0, 2, 3], [70, 72, 73]) == [True] * 3
    pool.close()


def test_keys_and_restart_are_those_of_the_python_path(pool: NvmePool, tmp_path: Path) -> None:
    """Generations grow: the newest copy of a key is found; a block without a key never."""
    write_blocks(pool, [0, 1, 2], [5, 6, 7])
    write_blocks(pool, [8, 9], [5, 6])
    assert all(write_blocks(pool, [3], [9], with_keys=False))
    pool.close()
    again = nvme_pool(tmp_path)
    slots: IntArray = again.recover().slots
    assert slots.tolist() == [2, 8, 9]
    again.close()


@pytest.fixture
def fresh() -> Iterator[None]:
    native_blocks.cache_clear()
    yield
    native_blocks.cache_clear()


@pytest.mark.usefixtures("fresh")
def test_without_the_library_one_line_says_so_and_python_moves_blocks(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module, "NativeBlocks", lambda: NativeBlocks(tmp_path / "librows.so"))
    with caplog.at_level(logging.WARNING):
        pools = [nvme_pool(tmp_path, name=name) for name in ("rank0", "rank1")]
    (line,) = [record.getMessage() for record in caplog.records]
    assert "one by one" in line and "takes a C compiler" in line
    for pool in pools:
        assert not isinstance(pool._io, NativePayloadIo)
        write_blocks(pool, [1], [1])
        assert_blocks(pool, [1], [1])
        pool.close()


@pytest.mark.parametrize("exported", [{}, {"XXH3_64bits": "strlen"}], ids=["none", "another"])
def test_an_xxhash_without_the_right_function_is_not_used(
    library: NativeBlocks, monkeypatch: pytest.MonkeyPatch, exported: dict[str, str]
) -> None:
    libc = ctypes.CDLL(None)

    class Module:
        pass

    other = Module()
    for name, actual in exported.items():
        setattr(other, name, libc[actual])
    real = ctypes.CDLL
    monkeypatch.setattr(ctypes, "CDLL", lambda path: other if "_xxhash" in path else real(path))
    with pytest.raises(OSError, match="xxhash"):
        NativeBlocks()


def test_a_library_of_another_version_is_not_called() -> None:
    other = next(file for file in Path(np.__file__).parent.rglob("*.so"))
    with pytest.raises(OSError, match="another version"):
        NativeBlocks(other)
