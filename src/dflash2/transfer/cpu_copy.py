"""Copies between a CPU "HBM" pool and host rows with torch's threaded copies, which run without the GIL.

Few large calls instead of many small ones: every return to Python waits for the GIL, up to 5 ms while the engine's
thread computes in Python.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from dflash2.transfer.plan import merge_runs, run_starts
from dflash2.types import ByteArray, IntArray

_WORD_BYTES = 8  # torch copies rows of int64 about twice as fast as rows of uint8


class CpuCopier:
    """See ``pools.base.PieceCopier``. Has no state and may be shared."""

    def gather(self, pieces: Sequence[torch.Tensor], slots: IntArray, buffer: ByteArray, rows: IntArray) -> None:
        """Pool to host rows."""
        host = torch.from_numpy(buffer)
        start = 0
        for piece in pieces:
            width = piece.shape[1]
            _copy(piece, slots, host[:, start : start + width], rows)
            start += width

    def scatter(self, pieces: Sequence[torch.Tensor], slots: IntArray, buffer: ByteArray, rows: IntArray) -> None:
        """Host rows to pool."""
        host = torch.from_numpy(buffer)
        start = 0
        for piece in pieces:
            width = piece.shape[1]
            _copy(host[:, start : start + width], rows, piece, slots)
            start += width


def _copy(src: torch.Tensor, src_rows: IntArray, dst: torch.Tensor, dst_rows: IntArray) -> None:
    """``dst[dst_rows] = src[src_rows]`` for uint8 matrices, by whichever way needs the fewest calls."""
    runs = merge_runs(src_rows, dst_rows)
    if not runs:
        return
    if len(runs) == 1:
        i, j, length = runs[0]
        dst[j : j + length].copy_(src[i : i + length])
        return
    src, dst = _as_words(src, dst)
    dst_starts = run_starts(dst_rows).tolist()
    if len(dst_starts) < len(runs):
        _select_into_runs(src, src_rows, dst, dst_rows, dst_starts)
        return
    for i, j, length in runs:
        dst[j : j + length].copy_(src[i : i + length])


def _select_into_runs(
    src: torch.Tensor, src_rows: IntArray, dst: torch.Tensor, dst_rows: IntArray, starts: list[int]
) -> None:
    index = torch.from_numpy(src_rows.astype(np.int64))
    for start, stop in zip(starts, [*starts[1:], len(dst_rows)], strict=True):
        first = int(dst_rows[start])
        torch.index_select(src, 0, index[start:stop], out=dst[first : first + stop - start])


def _as_words(src: torch.Tensor, dst: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The same memory as int64 where sizes and addresses allow it."""
    for tensor in (src, dst):
        if tensor.shape[1] % _WORD_BYTES or tensor.stride(0) % _WORD_BYTES or tensor.data_ptr() % _WORD_BYTES:
            return src, dst
    return src.view(torch.int64), dst.view(torch.int64)
