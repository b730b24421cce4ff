"""The headers of an NVMe pool: columns in memory that answer, and the index file that a restart reads."""

from __future__ import annotations

import os
import threading

import numpy as np
import numpy.typing as npt

from dflash2.errors import IntegrityError
from dflash2.pools.faultlog import FaultLog
from dflash2.pools.fileops import FileOps, write_fully
from dflash2.pools.nvme_format import EMPTY_HEADER, HEADER_BYTES, new_headers, pack_header
from dflash2.pools.nvme_recovery import RecoveredBlocks, newest_of_each_key, scan
from dflash2.types import KEY_BYTES, PAGE_BYTES, BoolArray, ByteArray, IntArray

_SECTOR_HEADERS = 512 // HEADER_BYTES


class HeaderTable:
    """One header per slot. Thread-safe for disjoint slots.

    A slot is readable from ``commit`` to ``forget``; a quarantined one never again. The file is told before memory
    says that a block is there, and memory before the file when it goes, so the file never promises more than memory.

    Args:
        index_fd: the open index file.
        num_slots: how many headers.
        payload_bytes: bytes under each checksum.
        ops: file calls.
        faults: where failures are counted, as ``header write error``.

    Attributes:
        recovered: what the file held, newest copy of each key; older copies are forgotten.
    """

    def __init__(self, index_fd: int, num_slots: int, payload_bytes: int, ops: FileOps, faults: FaultLog) -> None:
        self._fd = index_fd
        self._num_slots = num_slots
        self._payload_bytes = payload_bytes
        self._ops = ops
        self._faults = faults
        self._lock = threading.Lock()
        self._keys: ByteArray = np.zeros((num_slots, KEY_BYTES), dtype=np.uint8)
        self._checksums = np.zeros(num_slots, dtype=np.uint64)
        self._valid: BoolArray = np.zeros(num_slots, dtype=np.bool_)
        self._quarantined: BoolArray = np.zeros(num_slots, dtype=np.bool_)
        self._num_quarantined = 0
        found = scan(index_fd, num_slots, payload_bytes)
        newest = newest_of_each_key(found.keys)
        self._generation = found.next_generation
        self._keys[found.slots] = found.keys
        self._checksums[found.slots] = found.checksums
        self._valid[found.slots] = True
        self.recovered = RecoveredBlocks(found.slots[newest], found.keys[newest])
        self.forget(found.slots[~newest])

    @property
    def quarantined_slots(self) -> IntArray:
        """int32, ascending."""
        return np.flatnonzero(self._quarantined).astype(np.int32)

    @property
    def num_quarantined(self) -> int:
        return self._num_quarantined

    def readable(self, slots: IntArray, keys: ByteArray | None) -> BoolArray:
        """bool ``[n]``: there is a block at the slot, and it is the one of that key if one is given.

        A key of zeros stands for none: the block was taken out of the index since it was stored.
        """
        with self._lock:
            ok = self._valid[slots]
        if keys is None:
            return ok
        same = np.asarray((self._keys[slots] == keys).all(axis=1))
        return ok & (same | ~keys.any(axis=1))

    def checksum(self, slot: int) -> int:
        """xxh3-64 of the payload."""
        return int(self._checksums[slot])

    def checksums(self, slots: IntArray) -> npt.NDArray[np.uint64]:
        """uint64 ``[n]``, of the payloads."""
        return self._checksums[slots]

    def forget(self, slots: IntArray) -> BoolArray:
        """Make slots unreadable, in the file too.

        Returns:
            bool ``[n]``; False where the file could not be told or the slot is under quarantine: it must not be
            written, for its old header would then stand over a new payload.
        """
        self.empty(self.hide(slots))
        return self.writable(slots)

    def hide(self, slots: IntArray) -> IntArray:
        """Make slots unreadable in memory; those that were readable, ascending, whose headers must now be emptied."""
        with self._lock:
            stale = np.sort(slots[self._valid[slots]])
            self._valid[slots] = False
        return stale

    def empty(self, stale: IntArray) -> None:
        """Empty the headers of what ``hide`` returned; slots of which the file could not be told are quarantined."""
        written = self._write(stale.tolist(), [EMPTY_HEADER] * len(stale))
        self.quarantine(stale[~np.array(written, dtype=np.bool_)])

    def writable(self, slots: IntArray) -> BoolArray:
        """bool ``[n]``; False for slots under quarantine."""
        return ~self._quarantined[slots]

    def disown(self, slots: IntArray) -> BoolArray:
        """Take the keys of readable slots away, in the file too; their blocks stay readable here.

        Returns:
            bool ``[n]``; False where nothing was readable, or the file could not be told: those are quarantined.
        """
        with self._lock:
            kept = np.sort(slots[self._valid[slots]])
            self._keys[kept] = 0
        first = self._next_generations(len(kept))
        headers = [
            pack_header(None, self.checksum(slot), first + i, self._payload_bytes)
            for i, slot in enumerate(kept.tolist())
        ]
        written = self._write(kept.tolist(), headers)
        self.quarantine(kept[~np.array(written, dtype=np.bool_)])
        with self._lock:
            readable: BoolArray = self._valid[slots]
        return readable

    def commit(self, slots: IntArray, keys: ByteArray, checksums: list[int]) -> BoolArray:
        """Make ascending slots readable; False, and still unreadable, where the file could not be told."""
        first = self._next_generations(len(slots))
        headers = [
            pack_header(key.tobytes() if key.any() else None, checksum, first + i, self._payload_bytes)
            for i, (key, checksum) in enumerate(zip(keys, checksums, strict=True))
        ]
        stored = np.array(self._write(slots.tolist(), headers), dtype=np.bool_)
        self.show(slots[stored], keys[stored], np.array(checksums, dtype=np.uint64)[stored])
        return stored

    def unfinished(self, keys: ByteArray) -> np.ndarray[tuple[int], np.dtype[np.void]]:
        """Headers for blocks that are about to be written, without their checksums."""
        return new_headers(keys, self._next_generations(len(keys)), self._payload_bytes)

    def show(self, slots: IntArray, keys: ByteArray, checksums: npt.NDArray[np.uint64]) -> None:
        """Make slots readable whose headers the file has."""
        with self._lock:
            self._checksums[slots] = checksums
            self._keys[slots] = keys
            self._valid[slots] = True

    def _next_generations(self, count: int) -> int:
        with self._lock:
            first = self._generation
            self._generation += count
        return first

    def quarantine(self, slots: IntArray) -> None:
        """Never read or write these slots again."""
        with self._lock:
            self._valid[slots] = False
            self._num_quarantined += int(np.count_nonzero(~self._quarantined[slots]))
            self._quarantined[slots] = True
        self._write(np.sort(slots).tolist(), [EMPTY_HEADER] * len(slots))

    def sync(self) -> bool:
        """Bring the file to the medium; False if the system could not."""
        try:
            os.fdatasync(self._fd)
        except OSError as error:
            self._faults.report("header write error", f"not synced: {error}")
            return False
        return True

    def check_integrity(self) -> None:
        """Raise IntegrityError if a quarantined slot is readable or the file promises what memory does not."""
        if bool((self._valid & self._quarantined).any()):
            raise IntegrityError("a quarantined NVMe slot is readable")
        found = scan(self._fd, self._num_slots, self._payload_bytes)
        wrong = found.slots[~self._valid[found.slots] | (self._checksums[found.slots] != found.checksums)]
        wrong = wrong[~self._quarantined[wrong]]  # a dying disk may refuse to forget
        if len(wrong):
            raise IntegrityError(f"NVMe headers on disk differ from memory at slots {wrong[:8].tolist()}")

    def _write(self, slots: list[int], headers: list[bytes]) -> list[bool]:
        """Write headers of ascending slots; neighbours within one sector by one call, which cannot be torn."""
        written: list[bool] = []
        start = 0
        for stop in range(1, len(slots) + 1):
            if stop < len(slots) and slots[stop] == slots[stop - 1] + 1 and slots[stop] % _SECTOR_HEADERS:
                continue
            written += self._write_neighbours(slots[start], headers[start:stop])
            start = stop
        return written

    def _write_neighbours(self, first: int, headers: list[bytes]) -> list[bool]:
        try:
            write_fully(self._ops, self._fd, memoryview(b"".join(headers)), PAGE_BYTES + first * HEADER_BYTES)
        except OSError as error:
            if len(headers) > 1:  # find out which
                return [ok for i, header in enumerate(headers) for ok in self._write_neighbours(first + i, [header])]
            self._faults.report("header write error", f"slot {first}: {error}")
            return [False]
        return [True] * len(headers)
