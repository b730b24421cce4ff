"""The library built from ``rows.c``: copies a batch of rows in one call, without the GIL and past the cache.

It is built when the package is installed (``hatch_build.py``), where there is a C compiler. Without it copies in host
memory go through NumPy, at about half the speed; the log and ``dflash2 doctor`` say so.
"""

from __future__ import annotations

import ctypes
import functools
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from dflash2.types import ByteArray, IntArray

log = logging.getLogger(__name__)

LIBRARY = Path(__file__).with_name("librows.so")
AddressArray: TypeAlias = npt.NDArray[np.uintp]


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows in one or several matrices of one shape, each of which holds a piece of every row.

    Whoever makes one answers for the addresses, and keeps the memory while it is used.

    Attributes:
        pieces: uintp ``[num_pieces]``, addresses of the matrices.
        stride_bytes: from one row of a matrix to the next.
        num_rows: of each matrix.
    """

    pieces: AddressArray
    stride_bytes: int
    num_rows: int


class _Rows(ctypes.Structure):
    _fields_ = (("pieces", ctypes.c_void_p), ("stride", ctypes.c_size_t), ("num_rows", ctypes.c_int64))


class NativeRows:
    """The loaded library. Thread-safe.

    Raises:
        OSError: it is not there, or is not the one that this version of the package calls.
    """

    def __init__(self, library: Path = LIBRARY) -> None:
        if not library.exists():
            raise OSError("it was not built when the package was installed; that takes a C compiler")
        try:
            self._copy = ctypes.CDLL(str(library)).dflash2_copy_rows_2
        except AttributeError:
            raise OSError(f"{library} is of another version; install the package again") from None
        pointer, rows = ctypes.c_void_p, ctypes.POINTER(_Rows)
        self._copy.argtypes = (
            rows,
            pointer,
            rows,
            pointer,
            ctypes.c_int64,
            ctypes.c_int64,
            ctypes.c_size_t,
            ctypes.c_int64,
        )
        self._copy.restype = ctypes.c_int

    def copy(
        self, dst: Rows, dst_rows: IntArray, src: Rows, src_rows: IntArray, piece_bytes: int, num_threads: int = 1
    ) -> None:
        """For each i and each piece: row ``dst_rows[i]`` of ``dst`` = row ``src_rows[i]`` of ``src``.

        Args:
            dst: written to; none of its memory is ``src``'s.
            dst_rows: int32 ``[n]``, contiguous, distinct.
            src: read from; as many pieces as ``dst``.
            src_rows: int32 ``[n]``, contiguous.
            piece_bytes: copied of each piece, from its start.
            num_threads: most threads that copy, the caller among them; fewer where there is little to copy.

        Raises:
            ValueError: the arguments do not fit together.
            IndexError: a row that is not there; nothing was copied.
        """
        if len(dst.pieces) != len(src.pieces) or len(dst_rows) != len(src_rows):
            raise ValueError("a copy needs as many destinations as sources")
        if piece_bytes > min(dst.stride_bytes, src.stride_bytes):
            raise ValueError(f"pieces of {piece_bytes} bytes overlap in rows that lie closer together")
        for rows in (dst_rows, src_rows):
            if rows.dtype != np.int32 or rows.ndim != 1 or not rows.flags.c_contiguous:
                raise ValueError(
                    f"rows must be a contiguous int32 vector, not {rows.dtype} {rows.shape} with strides {rows.strides}"
                )
        status = self._copy(
            _Rows(dst.pieces.ctypes.data, dst.stride_bytes, dst.num_rows),
            dst_rows.ctypes.data,
            _Rows(src.pieces.ctypes.data, src.stride_bytes, src.num_rows),
            src_rows.ctypes.data,
            len(dst_rows),
            len(dst.pieces),
            piece_bytes,
            num_threads,
        )
        if status != 0:
            raise IndexError(f"a row is outside the {dst.num_rows} to write to or the {src.num_rows} to read from")


@functools.cache
def native_rows() -> NativeRows | None:
    """The library, loaded once; None, with one warning, where it cannot be had."""
    try:
        return NativeRows()
    except OSError as error:
        log.warning("copies in host memory run through NumPy, at about half the speed: no native copier, %s", error)
        return None


def rows_of(matrix: ByteArray, num_pieces: int = 1, piece_bytes: int = 0, *, written: bool = False) -> Rows:
    """The rows of a matrix, cut into ``num_pieces`` columns of ``piece_bytes`` from the left; one piece: whole rows.

    Args:
        matrix: uint8 ``[n, m]``; the bytes of a row are contiguous.
        num_pieces: columns.
        piece_bytes: width of each.
        written: it will be written to.

    Raises:
        ValueError: another type or shape, too narrow, or read-only though ``written``.
    """
    if matrix.dtype != np.uint8 or matrix.ndim != 2 or matrix.strides[1] != 1 or matrix.strides[0] < matrix.shape[1]:
        raise ValueError(f"need rows of contiguous bytes, got {matrix.dtype} {matrix.shape}")
    if num_pieces * piece_bytes > matrix.shape[1] or (written and not matrix.flags.writeable):
        raise ValueError(f"{num_pieces} x {piece_bytes} bytes do not fit {matrix.shape[1]}, or are read-only")
    pieces = matrix.ctypes.data + piece_bytes * np.arange(num_pieces, dtype=np.uintp)
    return Rows(pieces, matrix.strides[0], matrix.shape[0])
