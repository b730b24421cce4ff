"""Reading and writing the payloads of an NVMe pool: neighbours by one call, each block verified or failed alone."""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable
from enum import Enum

import numpy as np
import xxhash

from dflash2.pools.faultlog import FaultLog
from dflash2.pools.fileops import FileOps, read_fully, write_fully
from dflash2.pools.nvme_files import IoMode
from dflash2.pools.nvme_headers import HeaderTable
from dflash2.pools.nvme_rows import RowViews, row_views
from dflash2.types import PAGE_BYTES, BoolArray, ByteArray, IntArray, KVLayout

MAX_CALL_BYTES = 2 << 20
"""Neighbouring blocks are read and written by one call up to this size; more would hold a thread for a millisecond."""
_NO_SPACE = (errno.ENOSPC, errno.EDQUOT)


class PoolHealth(Enum):
    """Whether a pool takes new blocks."""

    OK = "ok"
    FULL = "full"
    """The device refused a write for want of space; one write in ``probe_interval_s`` tries again."""


class PayloadIo:
    """Payloads of slots that are striped over files. Thread-safe for disjoint slots.

    Args:
        data_fds: the open data files, in the order of their parts.
        headers: told of every block that was written, and of slots that are bad.
        layout: shape of a block.
        io_mode: how the data files are open.
        ops: file calls.
        faults: where failures are counted.
        probe_interval_s: how often a full device is tried again.
        clock: monotonic seconds.

    Attributes:
        health: see ``PoolHealth``.
    """

    def __init__(
        self,
        data_fds: list[int],
        headers: HeaderTable,
        layout: KVLayout,
        io_mode: IoMode,
        ops: FileOps,
        faults: FaultLog,
        probe_interval_s: float,
        clock: Callable[[], float],
    ) -> None:
        self.health = PoolHealth.OK
        self._data_fds = data_fds
        self._headers = headers
        self._stride_bytes, self._payload_bytes = layout.stride_bytes, layout.block_bytes
        self._io_mode = io_mode
        self._scratch = threading.local()
        self._ops = ops
        self._faults = faults
        self._probe_interval_s = probe_interval_s
        self._clock = clock
        self._lock = threading.Lock()
        self._next_probe = 0.0

    def load(self, slots: IntArray, buffer: ByteArray, rows: IntArray) -> BoolArray:
        """Read and verify readable blocks into rows of ``buffer``; bool ``[n]``, which arrived. Bad slots are
        quarantined."""
        views = self._views(buffer)
        ok: BoolArray = np.zeros(len(slots), dtype=np.bool_)
        for run in self._runs(slots, views.max_run):
            ok[run] = self._read_run(slots[run].tolist(), views, rows[run].tolist())
        return ok

    def store(self, slots: IntArray, buffer: ByteArray, rows: IntArray, keys: ByteArray) -> BoolArray:
        """Write rows of ``buffer`` to slots, then their headers; bool ``[n]``, which were stored.

        Args:
            slots: int32 ``[n]``, distinct.
            buffer: uint8 ``[m, stride_bytes]``, C-contiguous.
            rows: int32 ``[n]``, distinct.
            keys: uint8 ``[n, KEY_BYTES]``, zeros where a block has none.
        """
        ok = self._headers.forget(slots)
        ok[ok] = self._write_emptied(slots[ok], buffer, rows[ok], keys[ok])
        return ok

    def _write_emptied(self, slots: IntArray, buffer: ByteArray, rows: IntArray, keys: ByteArray) -> BoolArray:
        """Write rows to slots whose headers are empty, then their headers."""
        views = self._views(buffer)
        ok: BoolArray = np.zeros(len(slots), dtype=np.bool_)
        for run in self._runs(slots, views.max_run):
            ok[run] = self._write_run(slots[run], views, rows[run].tolist(), keys[run])
        return ok

    def _views(self, buffer: ByteArray) -> RowViews:
        return row_views(buffer, self._stride_bytes, self._io_mode, self._scratch)

    def _runs(self, slots: IntArray, max_run: int) -> list[list[int]]:
        """Group positions whose slots are neighbours in one file, up to ``MAX_CALL_BYTES`` a group."""
        parts = len(self._data_fds)
        most = max(1, min(max_run, MAX_CALL_BYTES // self._stride_bytes))
        place = [divmod(slot, parts)[::-1] for slot in slots.tolist()]
        runs: list[list[int]] = []
        for at in sorted(range(len(place)), key=place.__getitem__):
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
        return self._wrong_checksum(slot)

    def _write_run(self, slots: IntArray, views: RowViews, rows: list[int], keys: ByteArray) -> BoolArray:
        if len(slots) > 1 and self.health is PoolHealth.OK:
            fd, offset = self._address(int(slots[0]))
            buffers = [views.row(row) for row in rows]
            checksums = [xxhash.xxh3_64_intdigest(view[: self._payload_bytes]) for view in buffers]
            try:
                whole = self._ops.pwritev(fd, buffers, offset) == len(slots) * self._stride_bytes
            except OSError:
                whole = False  # block by block, to find out which
            if whole:
                return self._headers.commit(slots, keys, checksums)
        each = [self._write_block(slots[i : i + 1], views, rows[i], keys[i : i + 1]) for i in range(len(slots))]
        return np.array(each, dtype=np.bool_)

    def _write_block(self, slots: IntArray, views: RowViews, row: int, keys: ByteArray) -> bool:
        if not self._may_write():
            return False
        (slot,) = slots.tolist()
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
        return bool(self._headers.commit(slots, keys, [checksum])[0])

    def _write_failed(self, slot: int, error: OSError) -> None:
        if error.errno not in _NO_SPACE:
            self._faults.report("write error", f"slot {slot}: {error}")
            return
        with self._lock:
            self.health = PoolHealth.FULL
            self._next_probe = self._clock() + self._probe_interval_s
        self._faults.report("no space", f"slot {slot}: {error}; no more demotions here until space grows")

    def _wrong_checksum(self, slot: int) -> bool:
        return self._bad_slot(slot, "checksum mismatch", "the payload is not what was stored")

    def _bad_slot(self, slot: int, kind: str, detail: str) -> bool:
        self._faults.report(kind, f"slot {slot}: {detail}; slot quarantined")
        self._headers.quarantine(np.array([slot], dtype=np.int32))
        return False

    def _address(self, slot: int) -> tuple[int, int]:
        parts = len(self._data_fds)
        return self._data_fds[slot % parts], PAGE_BYTES + (slot // parts) * self._stride_bytes

    def _may_write(self) -> bool:
        if self.health is PoolHealth.OK:
            return True
        now = self._clock()
        with self._lock:
            if now < self._next_probe:
                return False
            self._next_probe = now + self._probe_interval_s
        return True
