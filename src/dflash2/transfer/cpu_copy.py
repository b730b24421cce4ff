"""Copies between an "HBM" pool in host memory and host rows.

What was measured (64 KiB and 1 MiB blocks, two cores): ``index_select`` into a run of neighbouring rows reaches
0.8-0.9 of memcpy and is one call without the GIL; ``index_copy_`` and NumPy's fancy indexing stay behind a plain loop
of row copies. So pairs are sorted by destination, runs there are filled by ``index_select``, lone rows by a row copy.
One thread moves about half of what the memory can: the engine gives each direction two.

Rows of ``LARGE_ROW_BYTES`` and more are copied one by one without torch: a torch operator opens a parallel region, and
once threads besides the model's have done that, libgomp counts more threads than cores and puts the model's workers to
sleep at each barrier instead of letting them spin. A decode step was a third slower after the first such copy.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from dflash2.transfer.plan import merge_runs
from dflash2.types import ByteArray, IntArray

LARGE_ROW_BYTES = 256 * 1024
_WORD_BYTES = 8  # torch copies rows of int64 faster than rows of uint8


class CpuCopier:
    """See ``pools.base.PieceCopier``. Has no state and may be shared."""

    def gather(self, pieces: Sequence[torch.Tensor], slots: IntArray, buffer: ByteArray, rows: IntArray) -> None:
        """Pool to host rows."""
        plan = _Plan(slots, rows)
        for piece, columns in zip(pieces, _columns(pieces, buffer), strict=True):
            plan.apply(piece, columns)

    def scatter(self, pieces: Sequence[torch.Tensor], slots: IntArray, buffer: ByteArray, rows: IntArray) -> None:
        """Host rows to pool."""
        plan = _Plan(rows, slots)
        for piece, columns in zip(pieces, _columns(pieces, buffer), strict=True):
            plan.apply(columns, piece)


def _columns(pieces: Sequence[torch.Tensor], buffer: ByteArray) -> list[torch.Tensor]:
    """For each piece the columns of ``buffer`` that hold it, as a view."""
    ends = np.cumsum([piece.shape[1] for piece in pieces]).tolist()
    host = torch.from_numpy(buffer)
    return [host[:, end - piece.shape[1] : end] for piece, end in zip(pieces, ends, strict=True)]


class _Plan:
    """The runs of one batch, ready to be applied to every piece."""

    def __init__(self, src_rows: IntArray, dst_rows: IntArray) -> None:
        runs = merge_runs(src_rows, dst_rows)
        self._straight = [(run.src[0], run.dst, len(run.src)) for run in runs if run.is_straight]
        self._collected = [(torch.tensor(run.src), run.dst, len(run.src)) for run in runs if not run.is_straight]

    def apply(self, src: torch.Tensor, dst: torch.Tensor) -> None:
        """Copy rows between two uint8 matrices."""
        src_bytes, dst_bytes = src.numpy(), dst.numpy()
        for first, start, length in self._straight:
            dst_bytes[start : start + length] = src_bytes[first : first + length]
        if src.shape[1] >= LARGE_ROW_BYTES:
            for index, start, _ in self._collected:
                for offset, row in enumerate(index.tolist()):
                    dst_bytes[start + offset] = src_bytes[row]
        elif self._collected:
            src, dst = _as_words(src, dst)
            for index, start, length in self._collected:
                torch.index_select(src, 0, index, out=dst[start : start + length])


def _as_words(src: torch.Tensor, dst: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The same memory as int64 where sizes and addresses allow it."""
    for tensor in (src, dst):
        if tensor.shape[1] % _WORD_BYTES or tensor.stride(0) % _WORD_BYTES or tensor.data_ptr() % _WORD_BYTES:
            return src, dst
    return src.view(torch.int64), dst.view(torch.int64)
