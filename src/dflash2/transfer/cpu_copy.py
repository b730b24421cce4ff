"""Copies between an "HBM" pool in host memory and host rows, by the native copier or by NumPy where it was not built.

The native copier takes a batch with all its pieces in one call, without the GIL and with threads of its own.

No torch operator copies here, though ``index_select`` alone is as fast: it opens a parallel region, and once threads
besides the model's have done that, libgomp counts more threads than cores and puts the model's workers to sleep at each
barrier instead of letting them spin. A decode step was a third slower after the first such copy, and two copy threads
disturb each other in the same way: at 64 KiB they moved a fifth of what memory can.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from dflash2.pools.native_rows import Rows, native_rows, rows_of
from dflash2.transfer.plan import merge_runs
from dflash2.types import ByteArray, IntArray

COPY_THREADS = 2
"""One core does not copy what the memory can, two do."""


class CpuCopier:
    """See ``pools.base.PieceCopier``. Has no state and may be shared.

    Args:
        native: use the native copier if there is one; otherwise, and without it, NumPy copies.
        num_threads: of the native copier, for one call.
    """

    def __init__(self, native: bool = True, num_threads: int = COPY_THREADS) -> None:
        self._native = native_rows() if native else None
        self._num_threads = num_threads

    @property
    def spreads_itself(self) -> bool:
        """See ``pools.base.SpreadsItself``."""
        return self._native is not None

    def gather(self, pieces: Sequence[torch.Tensor], slots: IntArray, buffer: ByteArray, rows: IntArray) -> None:
        """Pool to host rows."""
        if self._native is not None:
            width = pieces[0].shape[1]
            host = rows_of(buffer, len(pieces), width, written=True)
            self._native.copy(host, rows, _pool_rows(pieces), slots, width, self._num_threads)
            return
        plan = _Plan(slots, rows)
        for piece, columns in zip(pieces, _columns(pieces, buffer), strict=True):
            plan.apply(piece.numpy(), columns)

    def scatter(self, pieces: Sequence[torch.Tensor], slots: IntArray, buffer: ByteArray, rows: IntArray) -> None:
        """Host rows to pool."""
        if self._native is not None:
            width = pieces[0].shape[1]
            self._native.copy(
                _pool_rows(pieces), slots, rows_of(buffer, len(pieces), width), rows, width, self._num_threads
            )
            return
        plan = _Plan(rows, slots)
        for piece, columns in zip(pieces, _columns(pieces, buffer), strict=True):
            plan.apply(columns, piece.numpy())


def _pool_rows(pieces: Sequence[torch.Tensor]) -> Rows:
    """The slots of a pool. It has checked that its pieces are alike, so one is looked at."""
    first = rows_of(pieces[0].numpy())
    addresses = np.array([piece.data_ptr() for piece in pieces], dtype=np.uintp)
    return Rows(addresses, first.stride_bytes, first.num_rows)


def _columns(pieces: Sequence[torch.Tensor], buffer: ByteArray) -> list[ByteArray]:
    """For each piece the columns of ``buffer`` that hold it, as a view."""
    ends = np.cumsum([piece.shape[1] for piece in pieces]).tolist()
    return [buffer[:, end - piece.shape[1] : end] for piece, end in zip(pieces, ends, strict=True)]


class _Plan:
    """The runs of one batch, ready to be applied to every piece by NumPy.

    A run of neighbouring destinations is filled by one ``np.take`` without the GIL where rows are contiguous on both
    sides; pieces of a layer-first pool are copied row by row.
    """

    def __init__(self, src_rows: IntArray, dst_rows: IntArray) -> None:
        runs = merge_runs(src_rows, dst_rows)
        self._straight = [(run.src[0], run.dst, len(run.src)) for run in runs if run.is_straight]
        self._collected = [(run.src, run.dst) for run in runs if not run.is_straight]

    def apply(self, src: ByteArray, dst: ByteArray) -> None:
        """Copy rows between two matrices."""
        for first, start, length in self._straight:
            dst[start : start + length] = src[first : first + length]
        whole_rows = src.flags.c_contiguous and dst.flags.c_contiguous
        for rows, start in self._collected:
            if whole_rows:
                # With mode "raise" NumPy would fill a buffer of its own first; jobs are checked at submission.
                np.take(src, rows, axis=0, out=dst[start : start + len(rows)], mode="clip")
            else:
                for at, row in enumerate(rows, start):
                    dst[at] = src[row]
