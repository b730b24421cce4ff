"""Limits of this machine that paths are compared with: one large memcpy, and direct I/O on a file written before.

Needs NumPy only, so that a peer measured in an environment of its own is held against the very same limits.
"""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

MIB = 1 << 20
DISK_DEPTHS = (2, 4, 8)


def seconds(action: Callable[[], object]) -> float:
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


def page_aligned(nbytes: int) -> np.ndarray:
    """uint8 ``[nbytes]`` in memory of its own, of huge pages if there are any, as pools take it; touched once."""
    memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE)
    array = np.frombuffer(memory, dtype=np.uint8)
    array[:] = 1
    return array


class MemcpyLimit:
    """One large copy by one thread, and by two; the better counts."""

    def __init__(self, nbytes: int, threads: ThreadPoolExecutor) -> None:
        self._src, self._dst = page_aligned(nbytes), page_aligned(nbytes)
        self._threads = threads
        self.nbytes = nbytes

    def gb_s(self) -> float:
        half = self.nbytes // 2
        halves = [slice(0, half), slice(half, self.nbytes)]
        one = seconds(lambda: np.copyto(self._dst, self._src))
        two = seconds(lambda: list(self._threads.map(lambda h: np.copyto(self._dst[h], self._src[h]), halves)))
        return self.nbytes / min(one, two) / 1e9


class DiskLimit:
    """O_DIRECT calls of 1 MiB from several threads on a file that was written before; the best depth counts."""

    def __init__(self, directory: Path, nbytes: int, threads: ThreadPoolExecutor) -> None:
        self.path = directory / "limit"
        self.nbytes = nbytes // MIB * MIB
        flags = os.O_RDWR | os.O_CREAT
        try:
            self._fd = os.open(self.path, flags | os.O_DIRECT, 0o600)
            self.direct = True
        except OSError:
            self._fd = os.open(self.path, flags, 0o600)
            self.direct = False
        self._buffer = page_aligned(self.nbytes)
        self._buffer[:] = np.random.default_rng(0).integers(0, 256, self.nbytes, dtype=np.uint8)
        self._threads = threads
        os.posix_fallocate(self._fd, 0, self.nbytes)
        self._at_depth(8, os.pwritev)

    def write_gb_s(self) -> float:
        return self.nbytes / min(self._at_depth(depth, os.pwritev) for depth in DISK_DEPTHS) / 1e9

    def read_gb_s(self) -> float:
        return self.nbytes / min(self._at_depth(depth, os.preadv) for depth in DISK_DEPTHS) / 1e9

    def close(self) -> None:
        os.close(self._fd)
        self.path.unlink()

    def _at_depth(self, depth: int, call: Callable[[int, list[memoryview], int], int]) -> float:
        view = self._buffer.data
        offsets = range(0, self.nbytes, MIB)

        def share(first: int) -> None:
            for offset in offsets[first::depth]:
                call(self._fd, [view[offset : offset + MIB]], offset)

        return seconds(lambda: list(self._threads.map(share, range(depth))))
