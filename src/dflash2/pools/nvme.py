"""The NVMe tier: slots in preallocated files, every payload under a checksum, every slot under a header."""

from __future__ import annotations

import errno
import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path

import numpy as np
import xxhash

from dflash2.pools.faultlog import FaultLog
from dflash2.pools.fileops import FileOps, OsFileOps, read_fully, write_fully
from dflash2.pools.nvme_files import Geometry, IoMode, PoolFiles
from dflash2.pools.nvme_format import FINGERPRINT_BYTES
from dflash2.pools.nvme_headers import HeaderTable
from dflash2.pools.nvme_recovery import RecoveredBlocks, StaleBlocks
from dflash2.pools.nvme_rows import RowViews, row_views
from dflash2.types import PAGE_BYTES, BoolArray, ByteArray, IntArray, KVLayout, Tier

log = logging.getLogger(__name__)

_MAX_CALL_BYTES = 1 << 20
"""Neighbouring blocks are read and written by one call up to this size; more gains nothing and blocks a thread."""
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
        self._stride_bytes, self._payload_bytes = layout.stride_bytes, layout.block_bytes
        self._options = options or NvmeOptions()
        self._ops = self._options.files
        self._lock = threading.Lock()
        self._in_flight = 0
        self._next_probe = 0.0
        self._faults = FaultLog(log, clock=self._options.clock)
        self._scratch = threading.local()
        geometry = Geometry(num_slots, layout.stride_bytes, layout.block_bytes, fingerprint)
        direct_io, floor_bytes = self._options.direct_io, self._options.free_space_floor_bytes
        self._files = PoolFiles(directories, name, geometry, direct_io, floor_bytes)
        self._warn_of_stale()
        try:
            self._headers = HeaderTable(self._files.index_fd, num_slots, layout.block_bytes, self._ops, self._faults)
        except BaseException:
            self._files.close()
            raise

    @property
    def stale(self) -> StaleBlocks:
        """What an earlier run of another model or layout left and this start reclaimed."""
        return self._files.stale

    @property
    def folder(self) -> Path:
        """Where its files are; the first of them if there are several."""
        return self._files.folders[0]

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
        return self._headers.quarantined_slots

    @property
    def bytes_on_disk(self) -> int:
        """Space that the files take on their file systems."""
        fds = (self._files.index_fd, *self._files.data_fds)
        return sum(os.fstat(fd).st_blocks * 512 for fd in fds)

    def recover(self) -> RecoveredBlocks:
        """Blocks of an earlier run that can be read now, newest copy of each key; payloads are verified when loaded.

        The caller discards those that it does not adopt.
        """
        return self._headers.recovered

    def discard(self, slots: IntArray) -> BoolArray:
        """Make blocks unreadable, on disk too, before returning.

        Returns:
            bool ``[n]``; False where the disk could not be told (the slot is then quarantined).
        """
        if not len(slots):
            return np.ones(0, dtype=np.bool_)
        ok = self._headers.forget(slots)
        if not self._headers.sync():
            self._headers.quarantine(slots)
            ok[:] = False
        return ok

    def gather(self, slots: IntArray, buffer: ByteArray, rows: IntArray, keys: ByteArray | None = None) -> BoolArray:
        """See ``BlockPool.gather``; every block is verified. A slot that cannot be read is quarantined."""
        ok = self._headers.readable(slots, keys)
        self._enter()
        try:
            views = row_views(buffer, self._stride_bytes, self.io_mode, self._scratch)
            for run in self._runs(slots, np.flatnonzero(ok).tolist(), views.max_run):
                ok[run] = self._read_run(slots[run].tolist(), views, rows[run].tolist())
        finally:
            self._leave()
        return ok

    def scatter(self, slots: IntArray, buffer: ByteArray, rows: IntArray, keys: ByteArray | None = None) -> BoolArray:
        """See ``BlockPool.scatter``. Blocks without ``keys`` can be read back but never adopted at a restart."""
        ok = self._headers.forget(slots)
        self._enter()
        try:
            views = row_views(buffer, self._stride_bytes, self.io_mode, self._scratch)
            for run in self._runs(slots, np.flatnonzero(ok).tolist(), views.max_run):
                run_keys = [None if keys is None else keys[i].tobytes() for i in run]
                ok[run] = self._write_run(slots[run].tolist(), views, rows[run].tolist(), run_keys)
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
        """Raise IntegrityError if the headers in memory and on disk do not agree."""
        self._headers.check_integrity()

    def _warn_of_stale(self) -> None:
        if self.stale.num_blocks:
            log.warning(
                "%s holds %d stale blocks (%.2f GB) of another model or layout; they are reclaimed",
                self._files.folders[0],
                self.stale.num_blocks,
                self.stale.num_bytes / 1e9,
            )

    def _enter(self) -> None:
        with self._lock:
            self._in_flight += 1

    def _leave(self) -> None:
        with self._lock:
            self._in_flight -= 1

    def _may_write(self) -> bool:
        if self.health is PoolHealth.OK:
            return True
        now = self._options.clock()
        with self._lock:
            if now < self._next_probe:
                return False
            self._next_probe = now + self._options.probe_interval_s
        return True

    def _runs(self, slots: IntArray, positions: list[int], max_run: int) -> list[list[int]]:
        """Group positions whose slots are neighbours in one file, up to ``_MAX_CALL_BYTES`` a group."""
        parts = len(self._files.data_fds)
        most = max(1, min(max_run, _MAX_CALL_BYTES // self._stride_bytes))
        place = {at: divmod(slot, parts)[::-1] for at, slot in zip(positions, slots[positions].tolist(), strict=True)}
        runs: list[list[int]] = []
        for at in sorted(positions, key=place.__getitem__):
            part, index = place[at]
            if runs and len(runs[-1]) < most and place[runs[-1][-1]] == (part, index - 1):
                runs[-1].append(at)
            else:
                runs.append([at])
        return runs

    def _read_run(self, slots: list[int], views: RowViews, rows: list[int]) -> list[bool]:
        if len(slots) > 1:
            fd, offset = self._address(slots[0])
            buffers = [views.row(row) for row in rows]
            try:
                whole = self._ops.preadv(fd, buffers, offset) == len(slots) * self._stride_bytes
            except OSError:
                whole = False  # block by block, to find out which
            if whole:
                return [self._verify(slot, view) for slot, view in zip(slots, buffers, strict=True)]
        return [self._read_block(slot, views, row) for slot, row in zip(slots, rows, strict=True)]

    def _read_block(self, slot: int, views: RowViews, row: int) -> bool:
        fd, offset = self._address(slot)
        view = views.row(row)
        try:
            count = read_fully(self._ops, fd, view, offset)
        except OSError as error:
            return self._bad_slot(slot, "read error", str(error))
        if count < len(view):
            return self._bad_slot(slot, "short read", f"{count} of {len(view)} bytes")
        if not self._verify(slot, view):
            return False
        views.arrived(row)
        return True

    def _verify(self, slot: int, view: memoryview) -> bool:
        if xxhash.xxh3_64_intdigest(view[: self._payload_bytes]) == self._headers.checksum(slot):
            return True
        return self._bad_slot(slot, "checksum mismatch", "the payload is not what was stored")

    def _write_run(self, slots: list[int], views: RowViews, rows: list[int], keys: list[bytes | None]) -> list[bool]:
        if len(slots) > 1 and self.health is PoolHealth.OK:
            fd, offset = self._address(slots[0])
            buffers = [views.row(row) for row in rows]
            checksums = [xxhash.xxh3_64_intdigest(view[: self._payload_bytes]) for view in buffers]
            try:
                whole = self._ops.pwritev(fd, buffers, offset) == len(slots) * self._stride_bytes
            except OSError:
                whole = False  # block by block, to find out which
            if whole:
                return self._headers.commit(slots, keys, checksums)
        return [self._write_block(slot, views, row, key) for slot, row, key in zip(slots, rows, keys, strict=True)]

    def _write_block(self, slot: int, views: RowViews, row: int, key: bytes | None) -> bool:
        if not self._may_write():
            return False
        fd, offset = self._address(slot)
        view = views.filled_row(row)
        checksum = xxhash.xxh3_64_intdigest(view[: self._payload_bytes])
        try:
            write_fully(self._ops, fd, view, offset)
        except OSError as error:
            self._write_failed(slot, error)
            return False
        if self.health is PoolHealth.FULL:
            with self._lock:
                self.health = PoolHealth.OK
        return self._headers.commit([slot], [key], [checksum])[0]

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
        self._headers.quarantine(np.array([slot], dtype=np.int32))
        return False

    def _address(self, slot: int) -> tuple[int, int]:
        parts = len(self._files.data_fds)
        return self._files.data_fds[slot % parts], PAGE_BYTES + (slot // parts) * self._stride_bytes
