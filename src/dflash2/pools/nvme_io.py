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
from dflash2.pools.nvme_headers import HeaderTable
from dflash2.pools.nvme_rows import RowViews
from dflash2.types import PAGE_BYTES, IntArray, KVLayout

_MAX_CALL_BYTES = 2 << 20
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
        ops: FileOps,
        faults: FaultLog,
        probe_interval_s: float,
        clock: Callable[[], float],
    ) -> None:
        self.health = PoolHealth.OK
        self._data_fds = data_fds
        self._headers = headers
        self._stride_bytes, self._payload_bytes = layout.stride_bytes, layout.block_bytes
        self._ops = ops
        self._faults = faults
        self._probe_interval_s = probe_interval_s
        self._clock = clock
        self._lock = threading.Lock()
        self._next_probe = 0.0

    def runs(self, slots: IntArray, positions: list[int], max_run: int) -> list[list[int]]:
        """Group positions whose slots are neighbours in one file, up to ``_MAX_CALL_BYTES`` a group."""
        parts = len(self._data_fds)
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

    def read_run(self, slots: list[int], views: RowViews, rows: list[int]) -> list[bool]:
        """Read and verify the blocks of one run into ``rows``; which of them arrived. A bad slot is quarantined."""
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

    def write_run(self, slots: list[int], views: RowViews, rows: list[int], keys: list[bytes | None]) -> list[bool]:
        """Write ``rows`` to the slots of one run, then their headers; which of them were stored."""
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
            self._next_probe = self._clock() + self._probe_interval_s
        self._faults.report("no space", f"slot {slot}: {error}; no more demotions here until space grows")

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
