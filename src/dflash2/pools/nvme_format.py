"""What lies on disk: the first page of each file, and one 64-byte header per slot.

A rank has one index file and one data file per directory, each beginning with a page that says what it is::

    index:  [superblock 4 KiB][header of slot 0, 64 B][header of slot 1] ...
    data:   [superblock 4 KiB][payload of slot 0, stride][payload of the next slot on this directory] ...

Slot ``s`` of ``k`` directories lies on directory ``s % k`` at position ``s // k``. Headers have a file of their own
because buffered header writes and direct payload writes to one file would wait for each other's inode lock.
All integers are little-endian.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from enum import IntEnum
from typing import Final

import numpy as np
import xxhash

from dflash2.errors import StorageError
from dflash2.types import KEY_BYTES, PAGE_BYTES, ByteArray

MAGIC: Final = b"DFLASH2\x00"
FORMAT_VERSION: Final = 1
HEADER_BYTES: Final = 64
FINGERPRINT_BYTES: Final = 32
FLAG_VALID: Final = 1
FLAG_KEYED: Final = 2
"""The key names content; a block without it is never adopted at a restart."""

HEADER_DTYPE: Final = np.dtype(
    [
        ("key", "u1", (KEY_BYTES,)),
        ("checksum", "<u8"),  # xxh3-64 of the payload
        ("generation", "<u8"),  # grows with every write of this pool
        ("payload_bytes", "<u4"),
        ("flags", "<u4"),
        ("self_checksum", "<u8"),  # xxh3-64 of the 56 bytes before
    ]
)
_SELF_OFFSET = HEADER_BYTES - 8
_HEADER_TAIL = struct.Struct("<QQII")
_SUPERBLOCK = struct.Struct("<8sIIIIQQQ32s16s")


class FileRole(IntEnum):
    """What a file of the pool holds."""

    INDEX = 1
    DATA = 2


@dataclass(frozen=True, slots=True)
class Superblock:
    """The first page of a file of the pool.

    Attributes:
        role: index or data.
        part: which directory of ``num_parts`` this data file belongs to (0 for the index).
        num_parts: directories that the slots are striped over.
        num_slots: slots of the whole pool.
        stride_bytes: distance between payloads.
        payload_bytes: meaningful bytes of a payload.
        fingerprint: ``FINGERPRINT_BYTES`` bytes that name the KV layout; another one makes every entry stale.
        pool_id: random, ties the files of one pool together.
    """

    role: FileRole
    part: int
    num_parts: int
    num_slots: int
    stride_bytes: int
    payload_bytes: int
    fingerprint: bytes
    pool_id: bytes

    def pack(self) -> bytes:
        """One page."""
        body = _SUPERBLOCK.pack(
            MAGIC,
            FORMAT_VERSION,
            self.role,
            self.part,
            self.num_parts,
            self.num_slots,
            self.stride_bytes,
            self.payload_bytes,
            self.fingerprint,
            self.pool_id,
        )
        return (body + _digest(body)).ljust(PAGE_BYTES, b"\0")


def parse_superblock(page: bytes, path: str) -> Superblock | None:
    """Read a superblock.

    Returns:
        None for an empty or all-zero page: a file whose creation was interrupted.

    Raises:
        StorageError: not a file of this pool, or one that another version wrote.
    """
    if not page.strip(b"\0"):
        return None
    size = _SUPERBLOCK.size
    if len(page) < size + 8 or page[:8] != MAGIC:
        raise StorageError(
            f"{path} is not a DFlash2 block file and will not be overwritten; remove it or change the path"
        )
    (version,) = struct.unpack_from("<I", page, 8)
    if version != FORMAT_VERSION:
        raise StorageError(
            f"{path} has block file format {version}, this version reads and writes format {FORMAT_VERSION}; "
            "remove the file to start with an empty tier"
        )
    if page[size : size + 8] != _digest(page[:size]):
        raise StorageError(f"{path} has a damaged first page; remove the file to start with an empty tier")
    _, _, role, *rest = _SUPERBLOCK.unpack(page[:size])
    return Superblock(FileRole(role), *rest)


def pack_header(key: bytes | None, checksum: int, generation: int, payload_bytes: int) -> bytes:
    """The header of a complete block; ``key`` None for a block without identity."""
    flags = FLAG_VALID if key is None else FLAG_VALID | FLAG_KEYED
    body = (key or bytes(KEY_BYTES)) + _HEADER_TAIL.pack(checksum, generation, payload_bytes, flags)
    return body + _digest(body)


def new_headers(
    keys: ByteArray, first_generation: int, payload_bytes: int
) -> np.ndarray[tuple[int], np.dtype[np.void]]:
    """``HEADER_DTYPE`` ``[n]``, complete but for the checksums.

    Args:
        keys: uint8 ``[n, KEY_BYTES]``; zeros for a block without identity.
        first_generation: of the first; the others follow.
        payload_bytes: of each.
    """
    headers = np.zeros(len(keys), dtype=HEADER_DTYPE)
    headers["key"] = keys
    headers["generation"] = np.arange(first_generation, first_generation + len(keys), dtype=np.uint64)
    headers["payload_bytes"] = payload_bytes
    headers["flags"] = np.where(keys.any(axis=1), FLAG_VALID | FLAG_KEYED, FLAG_VALID)
    return headers


EMPTY_HEADER: Final = bytes(HEADER_BYTES)


def intact_rows(region: np.ndarray, payload_bytes: int) -> np.ndarray:
    """Indices of headers that are valid, keyed, whole and of the right payload length.

    Args:
        region: ``HEADER_DTYPE`` vector as read from the index file.
        payload_bytes: expected payload length.
    """
    wanted = FLAG_VALID | FLAG_KEYED
    candidates = np.flatnonzero((region["flags"] & wanted == wanted) & (region["payload_bytes"] == payload_bytes))
    raw = region.view(np.uint8).reshape(-1, HEADER_BYTES)
    stored = region["self_checksum"][candidates].tolist()
    whole = [
        xxhash.xxh3_64_intdigest(raw[row, :_SELF_OFFSET].tobytes()) == value
        for row, value in zip(candidates.tolist(), stored, strict=True)
    ]
    return candidates[np.array(whole, dtype=np.bool_)]


def _digest(body: bytes) -> bytes:
    return xxhash.xxh3_64_intdigest(body).to_bytes(8, "little")
