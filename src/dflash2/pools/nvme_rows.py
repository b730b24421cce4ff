"""Rows of a host buffer as I/O buffers; through an aligned page where direct I/O does not take the buffer itself."""

from __future__ import annotations

import mmap
import threading

from dflash2.pools.nvme_files import IoMode
from dflash2.types import PAGE_BYTES, ByteArray


class RowViews:
    """Rows of a buffer as I/O buffers.

    Attributes:
        max_run: how many rows may be used at once.
    """

    max_run = 1024  # IOV_MAX

    def __init__(self, buffer: ByteArray) -> None:
        self._view = buffer.reshape(-1).data
        self._stride_bytes = buffer.shape[1]

    def row(self, row: int) -> memoryview:
        """To read into."""
        return self._view[row * self._stride_bytes : (row + 1) * self._stride_bytes]

    def filled_row(self, row: int) -> memoryview:
        """To write from."""
        return self.row(row)

    def arrived(self, row: int) -> None:
        """What was read into ``row`` is good."""


class _BouncedViews(RowViews):
    """The same through one aligned row, for buffers that direct I/O does not take."""

    max_run = 1

    def __init__(self, buffer: ByteArray, page: mmap.mmap) -> None:
        super().__init__(buffer)
        self._page = memoryview(page)

    def row(self, row: int) -> memoryview:
        return self._page

    def filled_row(self, row: int) -> memoryview:
        self._page[:] = super().row(row)
        return self._page

    def arrived(self, row: int) -> None:
        super().row(row)[:] = self._page


def row_views(buffer: ByteArray, stride_bytes: int, io_mode: IoMode, scratch: threading.local) -> RowViews:
    """Views of ``buffer``.

    Args:
        buffer: uint8 ``[m, stride_bytes]``, C-contiguous.
        stride_bytes: bytes of a slot.
        io_mode: direct I/O needs page-aligned memory.
        scratch: keeps one bounce row for each thread that ever needs one.

    Raises:
        ValueError: the buffer has another shape.
    """
    if buffer.shape[1] != stride_bytes or not buffer.flags.c_contiguous:
        raise ValueError(f"buffer rows must be contiguous and of {stride_bytes} bytes, got shape {buffer.shape}")
    if io_mode == "buffered" or buffer.ctypes.data % PAGE_BYTES == 0:
        return RowViews(buffer)
    if not hasattr(scratch, "page"):
        scratch.page = mmap.mmap(-1, stride_bytes)
    return _BouncedViews(buffer, scratch.page)
