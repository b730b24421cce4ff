"""Host memory by the page: exact size, page-aligned, faulted in at start, optionally page-locked for a device."""

from __future__ import annotations

import mmap
from collections.abc import Callable
from typing import TypeAlias

import numpy as np

from dflash2.errors import CapacityError
from dflash2.types import PAGE_BYTES, ByteArray

_MADV_POPULATE_WRITE = 23  # Linux 5.14, linux/mman.h; not exported by Python's mmap module
_FAULT_CHUNK_BYTES = 256 * 1024 * 1024

PageLock: TypeAlias = Callable[[int, int], Callable[[], None]]
"""``lock(address, nbytes)`` page-locks a range for the device and returns what undoes it."""


class PageMemory:
    """Anonymous private memory of exactly ``nbytes`` (rounded up to a page, never to a power of two).

    Args:
        nbytes: size; at least 1.
        page_lock: called once per ``lock_chunk_bytes`` so that a large pool does not stop the start in one call.
        lock_chunk_bytes: a multiple of ``PAGE_BYTES``.

    Raises:
        CapacityError: the system refuses the memory.
    """

    def __init__(
        self, nbytes: int, page_lock: PageLock | None = None, lock_chunk_bytes: int = _FAULT_CHUNK_BYTES
    ) -> None:
        self.nbytes = -(-nbytes // PAGE_BYTES) * PAGE_BYTES
        try:
            self._map: mmap.mmap | None = mmap.mmap(-1, self.nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except OSError as error:
            raise CapacityError(f"cannot map {self.nbytes} bytes of host memory: {error}") from error
        # Huge pages: a gather of small blocks otherwise spends its time in TLB misses. Only a hint.
        if hasattr(mmap, "MADV_HUGEPAGE"):
            self._map.madvise(mmap.MADV_HUGEPAGE)
        self.bytes: ByteArray = np.frombuffer(self._map, dtype=np.uint8)
        self._fault_in(self._map)
        self._unlock: list[Callable[[], None]] = []
        if page_lock is not None:
            self._lock_pages(page_lock, lock_chunk_bytes)

    def _fault_in(self, mapping: mmap.mmap) -> None:
        """Take every page now: a tier that is too large for the machine must fail here, not in a run."""
        for start in range(0, self.nbytes, _FAULT_CHUNK_BYTES):
            length = min(_FAULT_CHUNK_BYTES, self.nbytes - start)
            try:
                mapping.madvise(_MADV_POPULATE_WRITE, start, length)
            except OSError:  # older kernel: touch one byte a page
                self.bytes[start : start + length : PAGE_BYTES] = 0

    def _lock_pages(self, page_lock: PageLock, chunk_bytes: int) -> None:
        address = self.bytes.ctypes.data
        try:
            for start in range(0, self.nbytes, chunk_bytes):
                self._unlock.append(page_lock(address + start, min(chunk_bytes, self.nbytes - start)))
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Undo page locks and drop the view; the mapping goes when the last array over it does. Idempotent."""
        while self._unlock:
            self._unlock.pop()()
        self.bytes = np.empty(0, dtype=np.uint8)
        self._map = None
