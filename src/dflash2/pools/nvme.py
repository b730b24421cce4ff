"""The NVMe tier: slots in preallocated files, every payload under a checksum, every slot under a header."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from dflash2.pools.faultlog import FaultLog
from dflash2.pools.fileops import FileOps, OsFileOps
from dflash2.pools.native_blocks import native_blocks
from dflash2.pools.nvme_files import Geometry, IoMode, PoolFiles
from dflash2.pools.nvme_format import FINGERPRINT_BYTES
from dflash2.pools.nvme_headers import HeaderTable
from dflash2.pools.nvme_io import PayloadIo, PoolHealth
from dflash2.pools.nvme_native import NativePayloadIo
from dflash2.pools.nvme_recovery import RecoveredBlocks, StaleBlocks
from dflash2.types import KEY_BYTES, BoolArray, ByteArray, IntArray, KVLayout, Tier

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class NvmeOptions:
    """What may be set; the defaults suit a local NVMe device.

    Attributes:
        direct_io: try O_DIRECT; where it is not possible buffered I/O is used, with one warning.
        free_space_floor_bytes: space that must stay free on the file system.
        probe_interval_s: how often a full device is tried again.
        io_threads: calls to the system at once that one ``gather`` or ``scatter`` makes, with the native library.
        files: the file calls; a test passes ones that fail, and blocks then go through them without the native library.
        clock: monotonic seconds.
    """

    direct_io: bool = True
    free_space_floor_bytes: int = 0
    probe_interval_s: float = 5.0
    io_threads: int = 8
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
        options = options or NvmeOptions()
        self._lock = threading.Lock()
        self._in_flight = 0
        self._faults = FaultLog(log, clock=options.clock)
        geometry = Geometry(num_slots, layout.stride_bytes, layout.block_bytes, fingerprint)
        self._files = PoolFiles(directories, name, geometry, options.direct_io, options.free_space_floor_bytes)
        self._warn_of_stale()
        try:
            self._headers = HeaderTable(
                self._files.index_fd, num_slots, layout.block_bytes, options.files, self._faults
            )
        except BaseException:
            self._files.close()
            raise
        parts = self._headers, layout, self._files.io_mode, options.files, self._faults
        times = options.probe_interval_s, options.clock
        native = native_blocks() if type(options.files) is OsFileOps else None
        self._io = (
            PayloadIo(self._files.data_fds, *parts, *times)
            if native is None
            else NativePayloadIo(native, self._files.index_fd, options.io_threads, self._files.data_fds, *parts, *times)
        )

    @property
    def spreads_itself(self) -> bool:
        """See ``pools.base.SpreadsItself``."""
        return isinstance(self._io, NativePayloadIo)

    @property
    def health(self) -> PoolHealth:
        """Whether the device takes new blocks."""
        return self._io.health

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
    def num_quarantined(self) -> int:
        """How many these are."""
        return self._headers.num_quarantined

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

    def disown(self, slots: IntArray) -> BoolArray:
        """Take blocks their keys, on disk too, before returning: this run still reads them, no later one ever will.

        Returns:
            bool ``[n]``; False where the disk could not be told (the slot is then quarantined) or nothing was stored.
        """
        if not len(slots):
            return np.ones(0, dtype=np.bool_)
        ok = self._headers.disown(slots)
        if not self._headers.sync():
            self._headers.quarantine(slots)
            ok[:] = False
        return ok

    def gather(self, slots: IntArray, buffer: ByteArray, rows: IntArray, keys: ByteArray | None = None) -> BoolArray:
        """See ``BlockPool.gather``; every block is verified. A slot that cannot be read is quarantined."""
        ok = self._headers.readable(slots, keys)
        with self._transfer():
            ok[ok] = self._io.load(slots[ok], buffer, rows[ok])
        return ok

    def scatter(self, slots: IntArray, buffer: ByteArray, rows: IntArray, keys: ByteArray | None = None) -> BoolArray:
        """See ``BlockPool.scatter``. Blocks without a key (all zeros, or no ``keys``) are never adopted later."""
        if keys is None:
            keys = np.zeros((len(slots), KEY_BYTES), dtype=np.uint8)
        with self._transfer():
            return self._io.store(slots, buffer, rows, keys)

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

    @contextmanager
    def _transfer(self) -> Iterator[None]:
        """While it lasts the files stay open."""
        with self._lock:
            self._in_flight += 1
        try:
            yield
        finally:
            with self._lock:
                self._in_flight -= 1
