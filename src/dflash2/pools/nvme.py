"""The NVMe tier: slots in preallocated files, every payload under a checksum, every slot under a header."""

from __future__ import annotations

import errno
import logging
import mmap
import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path

import numpy as np
import xxhash

from dflash2.errors import IntegrityError, StorageError
from dflash2.pools.faultlog import FaultLog
from dflash2.pools.fileops import FileOps, OsFileOps, read_fully, write_fully
from dflash2.pools.nvme_files import Geometry, IoMode, PoolFiles
from dflash2.pools.nvme_format import EMPTY_HEADER, FINGERPRINT_BYTES, HEADER_BYTES, pack_header
from dflash2.pools.nvme_recovery import RecoveredBlocks, StaleBlocks, newest_of_each_key, scan
from dflash2.types import KEY_BYTES, PAGE_BYTES, BoolArray, ByteArray, IntArray, KVLayout, Tier

log = logging.getLogger(__name__)

_NO_SPACE = (errno.ENOSPC, errno.EDQUOT)


class PoolHealth(Enum):
    """Whether a pool takes new blocks."""

    OK = "ok"
    FULL = "full"
    """The device refused a write for want of space; one write in ``probe_interval_s`` tries again."""


@dataclass(frozen=True, slots=True)
class NvmeOptions:
    """What may be set; the defaults suit a local NVMe device.

    Attributes:
        direct_io: try O_DIRECT; where it is not possible buffered I/O is used, with one warning.
        free_space_floor_bytes: space that must stay free on the file system.
        probe_interval_s: how often a full device is tried again.
        files: the file calls; a test passes ones that fail.
        clock: monotonic seconds.
    """

    direct_io: bool = True
    free_space_floor_bytes: int = 0
    probe_interval_s: float = 5.0
    files: FileOps = field(default_factory=OsFileOps)
    clock: Callable[[], float] = time.monotonic


class NvmePool:
    """Blocks in files that this pool alone owns.

    ``gather`` and ``scatter`` may run in several threads on disjoint slots. A header is invalidated before its slot is
    overwritten and written again after the payload, so a process that dies in between leaves an empty slot. A load is
    verified against its header; a slot that fails is quarantined: it stays unreadable and unwritable.

    Args:
        directories: absolute, existing directories on different devices; slots are striped over them.
        name: sub-directory that this rank owns, such as ``rank0``.
        num_slots: capacity in blocks.
        layout: shape of a block.
        fingerprint: ``FINGERPRINT_BYTES`` bytes naming model, weights, layout and rank; files with another are stale.
        options: see ``NvmeOptions``.

    Attributes:
        stale: what an earlier run with another layout left and this start reclaimed.

    Raises:
        StorageError: the files cannot be had (see ``PoolFiles``).
    """

    tier = Tier.NVME

    def __init__(
        self,
        directories: Sequence[Path],
        name: str,
        num_slots: int,
        layout: KVLayout,
        fingerprint: bytes,
        options: NvmeOptions | None = None,
    ) -> None:
        if len(fingerprint) != FINGERPRINT_BYTES:
            raise ValueError(f"fingerprint must have {FINGERPRINT_BYTES} bytes, got {len(fingerprint)}")
        self.num_slots = num_slots
        self.layout = layout
        self.health = PoolHealth.OK
        self._options = options or NvmeOptions()
        self._ops = self._options.files
        self._lock = threading.Lock()
        self._in_flight = 0
        self._next_probe = 0.0
        self._faults = FaultLog(log, clock=self._options.clock)
        self._scratch = threading.local()
        self._files = self._open(directories, name, fingerprint)
        try:
            self._load_headers()
        except BaseException:
            self._files.close()
            raise

    def _open(self, directories: Sequence[Path], name: str, fingerprint: bytes) -> PoolFiles:
        geometry = Geometry(self.num_slots, self.layout.stride_bytes, self.layout.block_bytes, fingerprint)
        options = self._options
        files = PoolFiles(directories, name, geometry, options.direct_io, options.free_space_floor_bytes)
        self.stale: StaleBlocks = files.stale
        if self.stale.num_blocks:
            log.warning(
                "%s holds %d stale blocks (%.2f GB) of another model or layout; they are reclaimed",
                files.folders[0],
                self.stale.num_blocks,
                self.stale.num_bytes / 1e9,
            )
        return files

    def _load_headers(self) -> None:
        """The headers live in memory as columns; the file is only written."""
        self._keys: ByteArray = np.zeros((self.num_slots, KEY_BYTES), dtype=np.uint8)
        self._checksums = np.zeros(self.num_slots, dtype=np.uint64)
        self._valid: BoolArray = np.zeros(self.num_slots, dtype=np.bool_)
        self._quarantined: BoolArray = np.zeros(self.num_slots, dtype=np.bool_)
        found = scan(self._files.index_fd, self.num_slots, self.layout.block_bytes)
        newest = newest_of_each_key(found.keys)
        slots, keys = found.slots[newest], found.keys[newest]
        self._generation = found.next_generation
        self._keys[slots] = keys
        self._checksums[slots] = found.checksums[newest]
        self._valid[slots] = True
        self._recovered = RecoveredBlocks(slots, keys)
        self.discard(found.slots[~newest])

    @property
    def io_mode(self) -> IoMode:
        """How the data files are really open."""
        return self._files.io_mode

    @property
    def fault_counts(self) -> dict[str, int]:
        """Failures by kind since the start: ``read error``, ``short read``, ``checksum mismatch``, ``write error``,
        ``no space``, ``header write error``."""
        return self._faults.counts

    @property
    def checksum_failures(self) -> int:
        """Loads whose bytes were not those that had been stored."""
        return self._faults.counts.get("checksum mismatch", 0)

    @property
    def quarantined_slots(self) -> IntArray:
        """int32; slots that failed and must not be given out again."""
        return np.flatnonzero(self._quarantined).astype(np.int32)

    @property
    def bytes_on_disk(self) -> int:
        """Space that the files take on their file systems."""
        fds = (self._files.index_fd, *self._files.data_fds)
        return sum(os.fstat(fd).st_blocks * 512 for fd in fds)

    def recover(self) -> RecoveredBlocks:
        """Blocks of an earlier run that can be read now, newest copy of each key; payloads are verified when loaded.

        The caller discards those that it does not adopt.
        """
        return self._recovered

    def discard(self, slots: IntArray) -> BoolArray:
        """Make blocks unreadable, on disk too, before returning.

        Returns:
            bool ``[n]``; False where the disk could not be told (the slot is then quarantined).
        """
        with self._lock:
            self._valid[slots] = False
        ok = np.array([self._write_header(slot, EMPTY_HEADER) for slot in slots.tolist()], dtype=np.bool_)
        if not len(slots):
            return ok
        try:
            os.fdatasync(self._files.index_fd)
        except OSError as error:
            self._faults.report("header write error", f"discard not synced: {error}")
            ok[:] = False
        self._quarantine(slots[~ok])
        return ok

    def gather(self, slots: IntArray, buffer: ByteArray, rows: IntArray, keys: ByteArray | None = None) -> BoolArray:
        """See ``BlockPool.gather``; every block is verified. A slot that cannot be read is quarantined."""
        with self._lock:
            ok = self._valid[slots] & ~self._quarantined[slots]
        if keys is not None:
            ok &= np.asarray((self._keys[slots] == keys).all(axis=1))
        self._enter()
        try:
            for i in np.flatnonzero(ok).tolist():
                ok[i] = self._read_block(int(slots[i]), buffer, int(rows[i]))
        finally:
            self._leave()
        return ok

    def scatter(self, slots: IntArray, buffer: ByteArray, rows: IntArray, keys: ByteArray | None = None) -> BoolArray:
        """See ``BlockPool.scatter``. Blocks without ``keys`` can be read back but never adopted at a restart."""
        ok = self._claim(slots)
        self._enter()
        try:
            for i in np.flatnonzero(ok).tolist():
                key = None if keys is None else keys[i].tobytes()
                ok[i] = self._may_write() and self._write_block(int(slots[i]), buffer, int(rows[i]), key)
        finally:
            self._leave()
        return ok

    def close(self) -> None:
        """Close the files and give up ownership. Idempotent.

        A thread that still hangs in the device keeps the files open: a closed descriptor's number would be given to
        another file, and the late write would go there.
        """
        with self._lock:
            if self._in_flight:
                log.error("%d transfers still hang in %s; its files stay open", self._in_flight, self._files.folders[0])
                return
            self._files.close()

    def check_integrity(self) -> None:
        """Raise IntegrityError if a quarantined slot is readable or the disk's headers differ from memory's."""
        if bool((self._valid & self._quarantined).any()):
            raise IntegrityError("a quarantined NVMe slot is readable")
        found = scan(self._files.index_fd, self.num_slots, self.layout.block_bytes)
        wrong = found.slots[~self._valid[found.slots] | (self._checksums[found.slots] != found.checksums)]
        wrong = wrong[~self._quarantined[wrong]]  # a dying disk may refuse to forget
        if len(wrong):
            raise IntegrityError(f"NVMe headers on disk differ from memory at slots {wrong[:8].tolist()}")

    def _enter(self) -> None:
        with self._lock:
            self._in_flight += 1

    def _leave(self) -> None:
        with self._lock:
            self._in_flight -= 1

    def _claim(self, slots: IntArray) -> BoolArray:
        """Forget what the slots hold, in memory and on disk, before their payload changes."""
        with self._lock:
            ok = ~self._quarantined[slots]
            stale = slots[self._valid[slots]]
            self._valid[stale] = False
        lost = [slot for slot in stale.tolist() if not self._write_header(slot, EMPTY_HEADER)]
        self._quarantine(np.array(lost, dtype=np.int32))
        return ok & ~self._quarantined[slots]

    def _may_write(self) -> bool:
        if self.health is PoolHealth.OK:
            return True
        now = self._options.clock()
        with self._lock:
            if now < self._next_probe:
                return False
            self._next_probe = now + self._options.probe_interval_s
        return True

    def _read_block(self, slot: int, buffer: ByteArray, row: int) -> bool:
        view, bounce = self._io_view(buffer, row)
        fd, offset = self._address(slot)
        try:
            count = read_fully(self._ops, fd, view, offset)
        except OSError as error:
            return self._bad_slot(slot, "read error", str(error))
        if count < len(view):
            return self._bad_slot(slot, "short read", f"{count} of {len(view)} bytes")
        if xxhash.xxh3_64_intdigest(view[: self.layout.block_bytes]) != int(self._checksums[slot]):
            return self._bad_slot(slot, "checksum mismatch", "the payload is not what was stored")
        if bounce:
            buffer[row] = np.frombuffer(view, dtype=np.uint8)
        return True

    def _write_block(self, slot: int, buffer: ByteArray, row: int, key: bytes | None) -> bool:
        view, bounce = self._io_view(buffer, row)
        if bounce:
            np.frombuffer(view, dtype=np.uint8)[:] = buffer[row]
        checksum = xxhash.xxh3_64_intdigest(view[: self.layout.block_bytes])
        fd, offset = self._address(slot)
        try:
            write_fully(self._ops, fd, view, offset)
        except OSError as error:
            self._write_failed(slot, error)
            return False
        with self._lock:
            generation = self._generation
            self._generation += 1
        if not self._write_header(slot, pack_header(key, checksum, generation, self.layout.block_bytes)):
            return False
        with self._lock:
            self._checksums[slot] = checksum
            self._keys[slot] = 0 if key is None else np.frombuffer(key, dtype=np.uint8)
            self._valid[slot] = True
            self.health = PoolHealth.OK
        return True

    def _write_failed(self, slot: int, error: OSError) -> None:
        if error.errno not in _NO_SPACE:
            self._faults.report("write error", f"slot {slot}: {error}")
            return
        with self._lock:
            self.health = PoolHealth.FULL
            self._next_probe = self._options.clock() + self._options.probe_interval_s
        self._faults.report("no space", f"slot {slot}: {error}; no more demotions here until space grows")

    def _bad_slot(self, slot: int, kind: str, detail: str) -> bool:
        self._faults.report(kind, f"slot {slot}: {detail}; slot quarantined")
        self._quarantine(np.array([slot], dtype=np.int32))
        self._write_header(slot, EMPTY_HEADER)
        return False

    def _quarantine(self, slots: IntArray) -> None:
        with self._lock:
            self._valid[slots] = False
            self._quarantined[slots] = True

    def _write_header(self, slot: int, header: bytes) -> bool:
        try:
            write_fully(self._ops, self._files.index_fd, memoryview(header), PAGE_BYTES + slot * HEADER_BYTES)
        except OSError as error:
            self._faults.report("header write error", f"slot {slot}: {error}")
            return False
        return True

    def _address(self, slot: int) -> tuple[int, int]:
        parts = len(self._files.data_fds)
        return self._files.data_fds[slot % parts], PAGE_BYTES + (slot // parts) * self.layout.stride_bytes

    def _io_view(self, buffer: ByteArray, row: int) -> tuple[memoryview, bool]:
        """The row as an I/O buffer; a bounce buffer of this thread where the row is not aligned for direct I/O."""
        stride = self.layout.stride_bytes
        if buffer.shape[1] != stride or not buffer.flags.c_contiguous:
            raise StorageError(f"buffer rows must be contiguous and of {stride} bytes, got shape {buffer.shape}")
        if self.io_mode == "direct" and buffer.ctypes.data % PAGE_BYTES:
            if not hasattr(self._scratch, "page_memory"):
                self._scratch.page_memory = mmap.mmap(-1, stride)
            return memoryview(self._scratch.page_memory), True
        return buffer.reshape(-1).data[row * stride : (row + 1) * stride], False
