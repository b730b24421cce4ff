"""The library's other half, built from ``blocks.c``: stores and loads a batch in one call without the GIL.

Beside a thread that computes in Python each return from a file call or a checksum waits up to 5 ms for the interpreter.
One call for a batch waits once; the threads that keep the device busy are the library's.
"""

from __future__ import annotations

import ctypes
import functools
import importlib
import logging
import sys
from enum import IntEnum
from pathlib import Path

import numpy as np
import numpy.typing as npt
import xxhash

from dflash2.pools.native_rows import LIBRARY
from dflash2.pools.nvme_format import HEADER_DTYPE
from dflash2.types import PAGE_BYTES, ByteArray, IntArray

log = logging.getLogger(__name__)

_HASH_NAMES = ("XXH3_64bits_dispatch", "XXH3_64bits")
"""In the order of preference: the first one uses what the processor has, such as AVX2."""
_SELF_TEST_SIZES = (0, 1, 16, 128, 240, 241, 1024, 5000)
"""xxh3 has an algorithm for each of these ranges."""


class BlockState(IntEnum):
    """How far a block came in a native call."""

    NOTHING = 0
    MOVED = 1
    """Its payload was read or written."""
    DONE = 2
    """Its header was written as well."""


class _Blocks(ctypes.Structure):
    _fields_ = (
        ("hash", ctypes.c_void_p),
        ("memory", ctypes.c_void_p),
        ("stride", ctypes.c_size_t),
        ("payload", ctypes.c_size_t),
        ("num_rows", ctypes.c_int64),
        ("count", ctypes.c_int64),
        ("max_run", ctypes.c_int64),
        ("num_threads", ctypes.c_int64),
        ("files", ctypes.c_void_p),
        ("rows", ctypes.c_void_p),
        ("offsets", ctypes.c_void_p),
        ("checksums", ctypes.c_void_p),
        ("states", ctypes.c_void_p),
    )


class _Index(ctypes.Structure):
    _fields_ = (
        ("start", ctypes.c_int64),
        ("stale", ctypes.c_void_p),
        ("num_stale", ctypes.c_int64),
        ("slots", ctypes.c_void_p),
        ("by_slot", ctypes.c_void_p),
        ("headers", ctypes.c_void_p),
        ("file", ctypes.c_int32),
    )


class BlockBatch:
    """Blocks that one call moves, neighbours in a file next to each other.

    Args:
        buffer: uint8 ``[m, stride_bytes]``, C-contiguous; page-aligned where the files are open for direct I/O.
        rows: int ``[n]``, distinct rows of ``buffer``.
        files: int ``[n]``, descriptors.
        offsets: int ``[n]``, where in the file.
        payload_bytes: of a row; what the checksum covers.
        max_run: most blocks moved by one call of the system.
        num_threads: most such calls at once.

    Attributes:
        checksums: uint64 ``[n]``, xxh3-64 of what was moved; meaningless where nothing was.
        states: uint8 ``[n]``, see ``BlockState``.
    """

    def __init__(
        self,
        buffer: ByteArray,
        rows: npt.NDArray[np.integer],
        files: npt.NDArray[np.integer],
        offsets: npt.NDArray[np.integer],
        payload_bytes: int,
        max_run: int,
        num_threads: int,
    ) -> None:
        if buffer.dtype != np.uint8 or buffer.ndim != 2 or not buffer.flags.c_contiguous:
            raise ValueError(f"need contiguous rows of bytes, got {buffer.dtype} {buffer.shape}")
        if payload_bytes > buffer.shape[1] or not len(rows) == len(files) == len(offsets):
            raise ValueError(f"{len(rows)} rows, {len(files)} files, {len(offsets)} offsets of {payload_bytes} bytes")
        count = len(rows)
        self.checksums = np.zeros(count, dtype=np.uint64)
        self.states = np.zeros(count, dtype=np.uint8)
        self.writeable = buffer.flags.writeable
        self._kept = (
            buffer,
            np.ascontiguousarray(files, dtype=np.int32),
            np.ascontiguousarray(rows, dtype=np.int32),
            np.ascontiguousarray(offsets, dtype=np.int64),
        )
        memory, *places = (array.ctypes.data for array in self._kept)
        results = self.checksums.ctypes.data, self.states.ctypes.data
        self.fields = (
            memory,
            buffer.shape[1],
            payload_bytes,
            len(buffer),
            count,
            max_run,
            num_threads,
            *places,
            *results,
        )


class NativeBlocks:
    """The loaded library. Thread-safe for disjoint slots.

    Raises:
        OSError: it, or the checksum that it is to use, is not there or not the right one.
    """

    def __init__(self, library: Path = LIBRARY) -> None:
        if not library.exists():
            raise OSError("it was not built when the package was installed; that takes a C compiler")
        if sys.byteorder != "little":
            raise OSError("headers are little-endian, this processor is not")
        try:
            loaded = ctypes.CDLL(str(library))
            self._load, self._store = loaded.dflash2_load_blocks_2, loaded.dflash2_store_blocks_2
        except AttributeError:
            raise OSError(f"{library} is of another version; install the package again") from None
        self._load.argtypes = (ctypes.POINTER(_Blocks),)
        self._store.argtypes = (ctypes.POINTER(_Blocks), ctypes.POINTER(_Index))
        self._load.restype = self._store.restype = ctypes.c_int
        self._hash = _xxh3_address()

    def load(self, batch: BlockBatch) -> None:
        """Read blocks; when a run of neighbours cannot be read whole, it and what was not begun are NOTHING.

        Raises:
            IndexError: a row that is not there; nothing was read.
            ValueError: the buffer is read-only.
        """
        if not batch.writeable:
            raise ValueError("cannot load into read-only memory")
        if self._load(_Blocks(self._hash, *batch.fields)) != 0:
            raise IndexError("a row is outside the buffer")

    def store(
        self,
        batch: BlockBatch,
        index_file: int,
        stale: IntArray,
        slots: IntArray,
        headers: np.ndarray[tuple[int], np.dtype[np.void]],
    ) -> bool:
        """Empty headers, write blocks, write their headers; ends early as ``load`` does.

        Args:
            batch: what to write.
            index_file: descriptor of the file with the headers.
            stale: int32, ascending slots whose headers are emptied first.
            slots: int32 ``[n]``, of the blocks.
            headers: ``HEADER_DTYPE`` ``[n]``, contiguous; the checksums are filled in where a block is DONE.

        Returns:
            False if a header could not be emptied; no payload was then written.

        Raises:
            IndexError: a row that is not there; nothing was written.
        """
        if headers.dtype != HEADER_DTYPE or not len(headers) == len(slots) == len(batch.states):
            raise ValueError("a block needs a slot and a header")
        by_slot = np.argsort(slots).astype(np.int32)
        stale, slots = np.ascontiguousarray(stale, dtype=np.int32), np.ascontiguousarray(slots, dtype=np.int32)
        index = _Index(
            PAGE_BYTES,
            stale.ctypes.data,
            len(stale),
            slots.ctypes.data,
            by_slot.ctypes.data,
            headers.ctypes.data,
            index_file,
        )
        status: int = self._store(_Blocks(self._hash, *batch.fields), index)
        if status == -1:
            raise IndexError("a row is outside the buffer")
        return status == 0


@functools.cache
def native_blocks() -> NativeBlocks | None:
    """The library, loaded once; None, with one line, where it cannot be had."""
    try:
        return NativeBlocks()
    except OSError as error:
        log.warning("NVMe blocks are stored and loaded one by one, which is slower: no native I/O, %s", error)
        return None


def _xxh3_address() -> int:
    """Address of the C function that xxhash's extension module exports, after a check that it is the same function."""
    try:
        module = ctypes.CDLL(importlib.import_module("xxhash._xxhash").__file__)
        function = next(getattr(module, name) for name in _HASH_NAMES if hasattr(module, name))
    except (AttributeError, OSError, StopIteration):
        raise OSError("the installed xxhash does not export its functions") from None
    function.argtypes, function.restype = (ctypes.c_char_p, ctypes.c_size_t), ctypes.c_uint64
    sample = bytes(i * 7 % 251 for i in range(max(_SELF_TEST_SIZES)))
    for size in _SELF_TEST_SIZES:
        if function(sample[:size], size) != xxhash.xxh3_64_intdigest(sample[:size]):
            raise OSError("the installed xxhash exports another function than it uses")
    address = ctypes.cast(function, ctypes.c_void_p).value
    assert address is not None
    return address
