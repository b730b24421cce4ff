"""The staging buffer: host memory that copies between HBM and NVMe pass through. Its own budget (invariant 7)."""

from __future__ import annotations

import threading
import time
from collections import deque
from dataclasses import dataclass

import numpy as np

from dflash2.errors import CapacityError, IntegrityError
from dflash2.pools.page_memory import PageLock, PageMemory
from dflash2.types import ByteArray

STAGING_BATCHES = 4
"""Two directions, two batches each: while one is on the device the next is filled. More would never be used."""
DEVICE_STAGING_BATCHES = 2
"""Device memory that the copies of a CUDA device take beside it (``cuda_copy``): one batch in each direction."""


@dataclass(frozen=True, slots=True)
class StagingChunk:
    """Room for one batch.

    Attributes:
        index: which chunk.
        rows: uint8 ``[chunk_blocks, stride_bytes]``, page-aligned.
    """

    index: int
    rows: ByteArray


class StagingBuffer:
    """Hands out chunks first come, first served. Thread-safe.

    A holder must not wait for another chunk while it holds one; with that rule no order of requests can deadlock.

    Args:
        budget_bytes: most that may be allocated. Only what can be in use at once is: ``4 * batch_blocks`` blocks.
        batch_blocks: blocks of a batch (``swap_batch_size``).
        stride_bytes: bytes of a block.
        page_lock: see ``PageMemory``.

    Attributes:
        nbytes: allocated.
        chunk_blocks: blocks of a chunk; less than ``batch_blocks`` where the budget is small.

    Raises:
        CapacityError: the budget does not hold one block.
    """

    def __init__(
        self, budget_bytes: int, batch_blocks: int, stride_bytes: int, page_lock: PageLock | None = None
    ) -> None:
        fits = budget_bytes // stride_bytes
        if fits < 1:
            raise CapacityError(f"a staging buffer of {budget_bytes} bytes does not hold one block of {stride_bytes}")
        num_chunks = min(STAGING_BATCHES, fits)
        self.chunk_blocks = min(batch_blocks, fits // num_chunks)
        chunk_bytes = self.chunk_blocks * stride_bytes
        self.nbytes = num_chunks * chunk_bytes
        self._memory = PageMemory(self.nbytes, page_lock)
        rows = self._memory.bytes[: self.nbytes].reshape(num_chunks, self.chunk_blocks, stride_bytes)
        self._chunks = [StagingChunk(i, rows[i]) for i in range(num_chunks)]
        self._free = list(range(num_chunks))
        self._changed = threading.Condition()
        self._waiting: deque[object] = deque()
        self._chunk_bytes = chunk_bytes
        self._peak = 0

    @property
    def in_use_bytes(self) -> int:
        """Bytes of the chunks that are out."""
        with self._changed:
            return (len(self._chunks) - len(self._free)) * self._chunk_bytes

    @property
    def peak_bytes(self) -> int:
        """Most that was ever in use at once."""
        with self._changed:
            return self._peak

    def try_acquire(self) -> StagingChunk | None:
        """A chunk, or None if none is free or somebody waits already."""
        with self._changed:
            return None if self._waiting or not self._free else self._take()

    def acquire(self, timeout_s: float) -> StagingChunk | None:
        """Wait in line for a chunk; None when the time is up."""
        deadline = time.monotonic() + timeout_s
        me = object()
        with self._changed:
            self._waiting.append(me)
            try:
                while self._waiting[0] is not me or not self._free:
                    left = deadline - time.monotonic()
                    if left <= 0:
                        return None
                    self._changed.wait(left)
                return self._take()
            finally:
                self._waiting.remove(me)
                self._changed.notify_all()

    def release(self, chunk: StagingChunk) -> None:
        """Give a chunk back.

        Raises:
            IntegrityError: it was not out.
        """
        with self._changed:
            if chunk.index in self._free:
                raise IntegrityError(f"staging chunk {chunk.index} released twice")
            self._free.append(chunk.index)
            self._changed.notify_all()

    def check_integrity(self, chunks_out: int) -> None:
        """Raise IntegrityError unless exactly ``chunks_out`` chunks are out."""
        with self._changed:
            out = len(self._chunks) - len(self._free)
            if out != chunks_out or len(set(self._free)) != len(self._free):
                raise IntegrityError(f"{out} staging chunks are out, {chunks_out} expected")

    def close(self) -> None:
        """Give the memory back; no chunk may be out."""
        self._chunks = []
        self._free = []
        self._memory.close()

    def _take(self) -> StagingChunk:
        chunk = self._chunks[self._free.pop()]
        self._peak = max(self._peak, (len(self._chunks) - len(self._free)) * self._chunk_bytes)
        return chunk


def chunk_rows(count: int) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
    """Rows 0 to ``count - 1`` of a chunk."""
    return np.arange(count, dtype=np.int32)
