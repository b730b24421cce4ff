"""The DRAM tier: one slab of host memory per slot, usable in place as an I/O buffer."""

from __future__ import annotations

import numpy as np

from dflash2.pools.native_rows import native_rows, rows_of
from dflash2.pools.page_memory import PageLock, PageMemory
from dflash2.types import BoolArray, ByteArray, IntArray, KVLayout, Tier


class DramPool:
    """``num_slots`` slabs of ``layout.stride_bytes`` bytes in one allocation of exactly that size.

    Args:
        num_slots: capacity in blocks.
        layout: shape of a block.
        page_lock: page-locks a range for the device (see ``PageMemory``); None without a device.

    Raises:
        CapacityError: the system refuses the memory.
    """

    tier = Tier.DRAM

    def __init__(self, num_slots: int, layout: KVLayout, page_lock: PageLock | None = None) -> None:
        self.num_slots = num_slots
        self.layout = layout
        self._memory = PageMemory(max(1, num_slots) * layout.stride_bytes, page_lock)
        used = num_slots * layout.stride_bytes
        self._slabs: ByteArray = self._memory.bytes[:used].reshape(num_slots, layout.stride_bytes)

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return self._memory.nbytes

    @property
    def slabs(self) -> ByteArray:
        """uint8 ``[num_slots, stride_bytes]``; row = slot."""
        return self._slabs

    def gather(self, slots: IntArray, buffer: ByteArray, rows: IntArray, keys: ByteArray | None = None) -> BoolArray:
        """See ``BlockPool.gather``; never fails."""
        copy_rows(self._slabs, slots, buffer, rows, self.layout.block_bytes)
        return np.ones(len(slots), dtype=np.bool_)

    def scatter(self, slots: IntArray, buffer: ByteArray, rows: IntArray, keys: ByteArray | None = None) -> BoolArray:
        """See ``BlockPool.scatter``; never fails."""
        copy_rows(buffer, rows, self._slabs, slots, self.layout.block_bytes)
        return np.ones(len(slots), dtype=np.bool_)

    def close(self) -> None:
        """Give the memory back."""
        self._slabs = np.empty((0, self.layout.stride_bytes), dtype=np.uint8)
        self._memory.close()


def copy_rows(src: ByteArray, src_rows: IntArray, dst: ByteArray, dst_rows: IntArray, nbytes: int) -> None:
    """``dst[dst_rows[i], :nbytes] = src[src_rows[i], :nbytes]``.

    Without the native copier a loop of row copies: NumPy's fancy indexing makes a temporary copy and reaches a third of
    the speed.
    """
    native = native_rows()
    if native is not None:
        native.copy(rows_of(dst, 1, nbytes, written=True), dst_rows, rows_of(src, 1, nbytes), src_rows, nbytes)
        return
    for i, j in zip(src_rows.tolist(), dst_rows.tolist(), strict=True):
        dst[j, :nbytes] = src[i, :nbytes]
