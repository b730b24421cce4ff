"""What an earlier run left on disk: headers that can be adopted, and entries of another layout."""

from __future__ import annotations

import os
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from dflash2.pools.nvme_format import HEADER_BYTES, HEADER_DTYPE, Superblock, intact_rows
from dflash2.types import KEY_BYTES, PAGE_BYTES, BoolArray, ByteArray, IntArray


@dataclass(frozen=True, slots=True)
class RecoveredBlocks:
    """Blocks that an earlier run left readable.

    Attributes:
        slots: int32 ``[n]``, in the order in which they were written.
        keys: uint8 ``[n, KEY_BYTES]``, distinct.
    """

    slots: IntArray
    keys: ByteArray


@dataclass(frozen=True, slots=True)
class StaleBlocks:
    """Entries of an earlier run that cannot be matched any more.

    Attributes:
        num_blocks: how many.
        num_bytes: payload bytes they took.
    """

    num_blocks: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class HeaderScan:
    """Intact headers, oldest write first; keys may repeat (the last one is the newest)."""

    slots: IntArray
    keys: ByteArray
    checksums: npt.NDArray[np.uint64]
    next_generation: int


def scan(index_fd: int, num_slots: int, payload_bytes: int) -> HeaderScan:
    """Read all headers of an index file, oldest write first.

    Args:
        index_fd: the file; where it ends early, the rest counts as empty.
        num_slots: how many headers to look at.
        payload_bytes: headers with another payload length are ignored.
    """
    region = _read_region(index_fd, num_slots)
    rows = intact_rows(region, payload_bytes)
    rows = rows[np.argsort(region["generation"][rows], kind="stable")]
    found = region[rows]
    return HeaderScan(
        rows.astype(np.int32),
        np.ascontiguousarray(found["key"]),
        found["checksum"].astype(np.uint64),
        int(found["generation"].max(initial=0)) + 1,
    )


def newest_of_each_key(keys: ByteArray) -> BoolArray:
    """bool ``[n]``: True for the last row of each distinct key in uint8 ``[n, KEY_BYTES]``."""
    newest = np.zeros(len(keys), dtype=np.bool_)
    _, first_from_end = np.unique(np.ascontiguousarray(keys[::-1]).view(f"V{KEY_BYTES}").ravel(), return_index=True)
    newest[len(keys) - 1 - first_from_end] = True
    return newest


def count_stale(index_fd: int, previous: Superblock) -> StaleBlocks:
    """Entries in an index file that will be wiped because its superblock is of another pool or layout."""
    found = scan(index_fd, previous.num_slots, previous.payload_bytes)
    return StaleBlocks(len(found.slots), len(found.slots) * previous.stride_bytes)


def _read_region(fd: int, num_slots: int) -> np.ndarray[tuple[int], np.dtype[np.void]]:
    wanted = num_slots * HEADER_BYTES
    raw = bytearray(wanted)
    view, done = memoryview(raw), 0
    while done < wanted:
        count = os.preadv(fd, [view[done:]], PAGE_BYTES + done)
        if count == 0:
            break
        done += count
    return np.frombuffer(raw, dtype=HEADER_DTYPE)
