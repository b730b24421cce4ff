"""The payloads of an NVMe pool through the native library: one call for a batch, without the GIL."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from dflash2.pools.faultlog import FaultLog
from dflash2.pools.fileops import FileOps
from dflash2.pools.native_blocks import BlockBatch, BlockState, NativeBlocks
from dflash2.pools.nvme_files import IoMode
from dflash2.pools.nvme_headers import HeaderTable
from dflash2.pools.nvme_io import MAX_CALL_BYTES, PayloadIo, PoolHealth
from dflash2.types import PAGE_BYTES, BoolArray, ByteArray, IntArray, KVLayout

_MIN_CALL_BYTES = 512 * 1024
"""A batch is not cut into smaller calls than this for the sake of having many at once."""


class NativePayloadIo(PayloadIo):
    """Does in one call what goes well; ``PayloadIo`` does the rest, and finds out block by block what is wrong.

    Args:
        native: the library.
        index_fd: the open index file.
        io_threads: most calls to the system at once.
        data_fds, headers, layout, io_mode, ops, faults, probe_interval_s, clock: see ``PayloadIo``.
    """

    def __init__(
        self,
        native: NativeBlocks,
        index_fd: int,
        io_threads: int,
        data_fds: list[int],
        headers: HeaderTable,
        layout: KVLayout,
        io_mode: IoMode,
        ops: FileOps,
        faults: FaultLog,
        probe_interval_s: float,
        clock: Callable[[], float],
    ) -> None:
        super().__init__(data_fds, headers, layout, io_mode, ops, faults, probe_interval_s, clock)
        self._native = native
        self._index_fd = index_fd
        self._io_threads = io_threads
        self._files = np.array(data_fds, dtype=np.int32)

    def load(self, slots: IntArray, buffer: ByteArray, rows: IntArray) -> BoolArray:
        """See ``PayloadIo.load``."""
        if self._views(buffer).max_run == 1:  # through an aligned row of its own
            return super().load(slots, buffer, rows)
        order = self._order(slots)
        batch = self._batch(slots[order], buffer, rows[order])
        self._native.load(batch)
        read = batch.states == BlockState.MOVED
        same = read & (batch.checksums == self._headers.checksums(slots[order]))
        ok: BoolArray = np.zeros(len(slots), dtype=np.bool_)
        ok[order] = same
        for slot in slots[order[read & ~same]].tolist():
            self._wrong_checksum(slot)
        rest = order[~read]
        if len(rest):
            ok[rest] = super().load(slots[rest], buffer, rows[rest])
        return ok

    def store(self, slots: IntArray, buffer: ByteArray, rows: IntArray, keys: ByteArray) -> BoolArray:
        """See ``PayloadIo.store``."""
        if self.health is not PoolHealth.OK or self._views(buffer).max_run == 1:
            return super().store(slots, buffer, rows, keys)
        stale = self._headers.hide(slots)
        ok = self._headers.writable(slots)
        order = np.flatnonzero(ok)
        order = order[self._order(slots[order])]
        headers = self._headers.unfinished(keys[order])
        batch = self._batch(slots[order], buffer, rows[order])
        if not self._native.store(batch, self._index_fd, stale, slots[order], headers):
            self._headers.empty(stale)
        done, moved = order[batch.states == BlockState.DONE], batch.states == BlockState.MOVED
        self._headers.show(slots[done], keys[done], batch.checksums[batch.states == BlockState.DONE])
        for i in np.flatnonzero(moved).tolist():
            at = order[i : i + 1]
            ok[at] = self._headers.commit(slots[at], keys[at], [int(batch.checksums[i])])
        rest = order[batch.states == BlockState.NOTHING]
        if len(rest):
            ok[rest] = self._headers.writable(slots[rest])
            rest = rest[ok[rest]]
            ok[rest] = self._write_emptied(slots[rest], buffer, rows[rest], keys[rest])
        return ok

    def _order(self, slots: IntArray) -> npt.NDArray[np.int64]:
        """Positions so that neighbours in a file are next to each other."""
        parts = len(self._files)
        order: npt.NDArray[np.int64] = np.lexsort((slots // parts, slots % parts)) if parts > 1 else np.argsort(slots)
        return order

    def _batch(self, slots: IntArray, buffer: ByteArray, rows: IntArray) -> BlockBatch:
        parts, stride = len(self._files), self._stride_bytes
        offsets = PAGE_BYTES + (slots // parts).astype(np.int64) * stride
        call_bytes = min(MAX_CALL_BYTES, max(_MIN_CALL_BYTES, len(slots) * stride // self._io_threads))
        max_run = max(1, call_bytes // stride)
        files = self._files[slots % parts]
        return BlockBatch(buffer, rows, files, offsets, self._payload_bytes, max_run, self._io_threads)
