"""The native copier does what plain NumPy does, and refuses what would touch other memory."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflash2.pools import native_rows as module
from dflash2.pools.dram import copy_rows
from dflash2.pools.native_rows import LIBRARY, NativeRows, Rows, native_rows, rows_of
from dflash2.types import ByteArray


@pytest.fixture(scope="module")
def library() -> NativeRows:
    if not LIBRARY.exists():
        pytest.skip("the package was installed without a C compiler: there is no native copier")
    return NativeRows()


@pytest.fixture
def fresh() -> Iterator[None]:
    """The library is looked for again, before the test and after it."""
    native_rows.cache_clear()
    yield
    native_rows.cache_clear()


def matrix(num_rows: int, stride: int, offset: int, seed: int) -> tuple[ByteArray, ByteArray]:
    """All bytes of a piece of memory, and rows in it that begin ``offset`` bytes behind a multiple of 64."""
    memory = np.random.default_rng(seed).integers(0, 256, num_rows * stride + 256, dtype=np.uint8)
    start = -memory.ctypes.data % 64 + offset
    return memory, memory[start : start + num_rows * stride].reshape(num_rows, stride)


@st.composite
def copies(draw: st.DrawFn) -> tuple[int, int, list[int], list[int], int, int, tuple[int, int]]:
    """Pieces, their width, rows to read and to write, padding of either side, alignment of either side."""
    pieces = draw(st.integers(1, 4))
    width = draw(st.one_of(st.integers(1, 200), st.integers(500, 2500), st.integers(1, 40).map(lambda n: 64 * n)))
    to = draw(st.lists(st.integers(0, 8), unique=True, max_size=9))
    source = draw(st.lists(st.integers(0, 8), min_size=len(to), max_size=len(to)))
    pads = draw(st.integers(0, 130)), draw(st.integers(0, 130))
    return pieces, width, source, to, *pads, (draw(st.integers(0, 63)), draw(st.integers(0, 63)))


@given(copy=copies(), gathers=st.booleans())
def test_equals_numpy_for_any_rows_strides_and_alignments(
    library: NativeRows, copy: tuple[int, int, list[int], list[int], int, int, tuple[int, int]], gathers: bool
) -> None:
    num_pieces, width, source, to, pad, pool_pad, (offset, pool_offset) = copy
    memory, host = matrix(9, num_pieces * width + pad, offset, 1)
    pools = [matrix(9, width + pool_pad, pool_offset, 2 + piece) for piece in range(num_pieces)]
    pool = Rows(np.array([rows.ctypes.data for _, rows in pools], dtype=np.uintp), width + pool_pad, 9)
    before, pools_before = memory.copy(), [all_bytes.copy() for all_bytes, _ in pools]
    dst_rows, src_rows = np.array(to, dtype=np.int32), np.array(source, dtype=np.int32)
    if gathers:
        library.copy(rows_of(host, num_pieces, width, written=True), dst_rows, pool, src_rows, width)
    else:
        library.copy(pool, dst_rows, rows_of(host, num_pieces, width), src_rows, width)
    for piece, (all_bytes, rows) in enumerate(pools):
        columns = slice(piece * width, (piece + 1) * width)
        for i, j in zip(source, to, strict=True):
            if gathers:
                assert np.array_equal(host[j, columns], rows[i, :width])
                host[j, columns] = before_of(host, memory, before)[j, columns]
            else:
                assert np.array_equal(rows[j, :width], host[i, columns])
                rows[j, :width] = before_of(rows, all_bytes, pools_before[piece])[j, :width]
    # With the copied bytes put back nothing may have changed.
    assert np.array_equal(memory, before)
    assert all(np.array_equal(now, then) for (now, _), then in zip(pools, pools_before, strict=True))


@pytest.mark.parametrize("num_threads", [0, 1, 2, 3, 100])
@pytest.mark.parametrize("width", [999, 70_000, 700_000])
def test_several_threads_copy_each_row_once(library: NativeRows, num_threads: int, width: int) -> None:
    num_rows, num_pieces = 8_400_000 // width // 3, 3
    _, host = matrix(num_rows, num_pieces * width, 0, 1)
    pools = [np.zeros((num_rows, width), dtype=np.uint8) for _ in range(num_pieces)]
    pool = Rows(np.array([rows.ctypes.data for rows in pools], dtype=np.uintp), width, num_rows)
    to = np.random.default_rng(2).permutation(num_rows).astype(np.int32)
    each = np.arange(num_rows, dtype=np.int32)
    library.copy(pool, to, rows_of(host, num_pieces, width), each, width, num_threads)
    for piece, rows in enumerate(pools):
        assert np.array_equal(rows[to], host[:, piece * width : (piece + 1) * width])


def before_of(view: ByteArray, memory: ByteArray, before: ByteArray) -> ByteArray:
    """The same view over the copy that was made of ``memory``."""
    start = view.ctypes.data - memory.ctypes.data
    return before[start : start + view.size].reshape(view.shape)


@pytest.mark.parametrize(("source", "to"), [([0, 4], [0, 1]), ([0, 1], [3, 6]), ([-1], [0]), ([0], [-1])])
def test_a_row_that_is_not_there_is_refused_before_anything_is_copied(
    library: NativeRows, source: list[int], to: list[int]
) -> None:
    _, src = matrix(4, 1024, 0, 1)
    memory, dst = matrix(6, 1024, 0, 2)
    before = memory.copy()
    with pytest.raises(IndexError, match="outside the 6 to write to or the 4 to read from"):
        library.copy(rows_of(dst), np.array(to, dtype=np.int32), rows_of(src), np.array(source, dtype=np.int32), 1024)
    assert np.array_equal(memory, before)


def test_arguments_that_do_not_fit_together_are_refused(library: NativeRows) -> None:
    _, rows = matrix(6, 1024, 0, 1)
    one, two = np.zeros(1, dtype=np.int32), np.zeros(2, dtype=np.int32)
    other = np.zeros((6, 1024), dtype=np.uint8)
    with pytest.raises(ValueError, match="as many destinations"):
        library.copy(rows_of(other), one, rows_of(rows), two, 64)
    with pytest.raises(ValueError, match="as many destinations"):
        library.copy(rows_of(other), one, rows_of(rows, 2, 512), one, 64)
    with pytest.raises(ValueError, match="overlap"):
        library.copy(rows_of(other), one, rows_of(rows), one, 1025)
    with pytest.raises(ValueError, match="int64"):
        library.copy(rows_of(other), one.astype(np.int64), rows_of(rows), one, 64)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="contiguous"):
        library.copy(rows_of(other), np.zeros(4, dtype=np.int32)[::2], rows_of(rows), two, 64)


def test_memory_that_is_no_rows_of_bytes_is_refused() -> None:
    for wrong in (np.zeros((2, 8), dtype=np.int16), np.zeros((2, 8), dtype=np.uint8)[:, ::2], np.zeros(8, np.uint8)):
        with pytest.raises(ValueError, match="contiguous bytes"):
            rows_of(wrong)
    with pytest.raises(ValueError, match="do not fit"):
        rows_of(np.zeros((2, 8), dtype=np.uint8), 3, 3)
    fixed = np.zeros((2, 8), dtype=np.uint8)
    fixed.flags.writeable = False
    assert rows_of(fixed).num_rows == 2
    with pytest.raises(ValueError, match="read-only"):
        rows_of(fixed, written=True)


@pytest.mark.usefixtures("fresh")
def test_without_the_library_one_line_says_so_and_numpy_copies(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module, "NativeRows", lambda: NativeRows(tmp_path / "librows.so"))
    with caplog.at_level(logging.WARNING):
        assert native_rows() is None and native_rows() is None
    (line,) = [record.getMessage() for record in caplog.records]
    assert "half the speed" in line and "takes a C compiler" in line
    src = np.arange(32, dtype=np.uint8).reshape(4, 8)
    dst = np.zeros((3, 8), dtype=np.uint8)
    copy_rows(src, np.array([3, 1], dtype=np.int32), dst, np.array([0, 2], dtype=np.int32), 5)
    assert dst.tolist() == [[24, 25, 26, 27, 28, 0, 0, 0], [0] * 8, [8, 9, 10, 11, 12, 0, 0, 0]]


def test_a_library_of_another_version_is_not_called() -> None:
    other = next(file for file in Path(np.__file__).parent.rglob("*.so"))
    with pytest.raises(OSError, match="another version"):
        NativeRows(other)
