"""Copies between an "HBM" pool in host memory and host rows.

What was measured (64 KiB and 1 MiB blocks, two cores): ``index_select`` into a run of neighbouring rows reaches
0.8-0.9 of memcpy and is one call without the GIL; ``index_copy_`` and NumPy's fancy indexing stay behind a plain loop
of row copies. So pairs are sorted by destination, runs there are filled by ``index_select``, lone rows by a row copy.
One thread moves about half of what the memory can: the engine gives each direction two.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from dflash2.types import ByteArray, IntArray

_WORD_BYTES = 8  # torch copies rows of int64 faster than rows of uint8


@dataclass(frozen=True, slots=True)
class _Fill:
    """Rows ``first`` to ``first + length - 1`` of the destination from the source rows ``index``."""

    first: int
    length: int
    index: torch.Tensor


class CpuCopier:
    """See ``pools.base.PieceCopier``. Has no state and may be shared."""

    def gather(self, pieces: Sequence[torch.Tensor], slots: IntArray, buffer: ByteArray, rows: IntArray) -> None:
        """Pool to host rows."""
        copies, fills = _plan(slots, rows)
        for piece, columns in zip(pieces, _columns(pieces, buffer), strict=True):
            _apply(copies, fills, piece, columns)

    def scatter(self, pieces: Sequence[torch.Tensor], slots: IntArray, buffer: ByteArray, rows: IntArray) -> None:
        """Host rows to pool."""
        copies, fills = _plan(rows, slots)
        for piece, columns in zip(pieces, _columns(pieces, buffer), strict=True):
            _apply(copies, fills, columns, piece)


def _columns(pieces: Sequence[torch.Tensor], buffer: ByteArray) -> list[torch.Tensor]:
    """For each piece the columns of ``buffer`` that hold it, as a view."""
    ends = np.cumsum([piece.shape[1] for piece in pieces]).tolist()
    host = torch.from_numpy(buffer)
    return [host[:, end - piece.shape[1] : end] for piece, end in zip(pieces, ends, strict=True)]


def _plan(src_rows: IntArray, dst_rows: IntArray) -> tuple[list[tuple[int, int, int]], list[_Fill]]:
    """What to copy as plain runs ``(src, dst, length)``, and what to collect from scattered rows.

    Lists, not arrays: a batch has a few dozen rows, and NumPy would take longer to start than to count them.
    """
    copies: list[tuple[int, int, int]] = []
    fills: list[_Fill] = []
    pairs = sorted(zip(dst_rows.tolist(), src_rows.tolist(), strict=True))
    start = 0
    for stop in range(1, len(pairs) + 1):
        if stop < len(pairs) and pairs[stop][0] == pairs[stop - 1][0] + 1:
            continue
        first, sources = pairs[start][0], [source for _, source in pairs[start:stop]]
        if sources == list(range(sources[0], sources[0] + len(sources))):
            copies.append((sources[0], first, len(sources)))
        else:
            fills.append(_Fill(first, len(sources), torch.tensor(sources)))
        start = stop
    return copies, fills


def _apply(copies: list[tuple[int, int, int]], fills: list[_Fill], src: torch.Tensor, dst: torch.Tensor) -> None:
    if copies:
        src_bytes, dst_bytes = src.numpy(), dst.numpy()
        for i, j, length in copies:
            dst_bytes[j : j + length] = src_bytes[i : i + length]
    if fills:
        src, dst = _as_words(src, dst)
        for fill in fills:
            torch.index_select(src, 0, fill.index, out=dst[fill.first : fill.first + fill.length])


def _as_words(src: torch.Tensor, dst: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The same memory as int64 where sizes and addresses allow it."""
    for tensor in (src, dst):
        if tensor.shape[1] % _WORD_BYTES or tensor.stride(0) % _WORD_BYTES or tensor.data_ptr() % _WORD_BYTES:
            return src, dst
    return src.view(torch.int64), dst.view(torch.int64)
