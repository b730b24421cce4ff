"""How the bytes of a batch go from one pool to another: straight, with the DRAM slabs as buffer, or through staging."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from dflash2.pools.base import BlockPool, HostAddressable, LayerWise
from dflash2.transfer.base import LayerWatcher
from dflash2.transfer.jobs import Batch
from dflash2.transfer.staging import StagingChunk, chunk_rows
from dflash2.transfer.workers import Step
from dflash2.types import BoolArray, ByteArray, IntArray


class Route:
    """One ordered pair of pools. What kind of pools they are is looked at once: it takes longer than a small copy.

    Args:
        src: pool that is read.
        dst: pool that is written.

    Attributes:
        src, dst: see above.
        tiers: of both.
        staged: True where neither pool's memory can be the other's buffer.
        straight_reads_source: for a route that is not staged: True where the source does the copying, and so a failure
            is the source's.
    """

    def __init__(self, src: BlockPool, dst: BlockPool) -> None:
        self.src = src
        self.dst = dst
        self.tiers = (src.tier, dst.tier)
        self._from_slabs = src if isinstance(src, HostAddressable) else None
        self._to_slabs = dst if isinstance(dst, HostAddressable) else None
        self._by_layer = dst if isinstance(dst, LayerWise) else None
        self.staged = self._from_slabs is None and self._to_slabs is None
        self.straight_reads_source = self._to_slabs is not None

    def straight_step(self, batch: Batch) -> Step:
        """The only step of a route that is not staged."""
        src_slots, dst_slots, keys = _slices(batch)
        if self._to_slabs is not None:
            slabs = self._to_slabs.slabs
            return _when_ready(batch, lambda at: self.src.gather(src_slots[at], slabs, dst_slots[at], _pick(keys, at)))
        if self._from_slabs is not None:
            slabs, watcher, pool = self._from_slabs.slabs, batch.pending.job.layers, self._by_layer
            if watcher is not None and pool is not None:
                return _when_ready(batch, lambda at: _by_layer(pool, watcher, dst_slots[at], slabs, src_slots[at]))
            return _when_ready(batch, lambda at: self.dst.scatter(dst_slots[at], slabs, src_slots[at], _pick(keys, at)))
        raise TypeError(f"route {self.tiers} needs staging")

    def gather_step(self, batch: Batch, chunk: StagingChunk) -> Step:
        """First step of a staged route: source to chunk."""
        src_slots, _, keys = _slices(batch)
        rows = chunk_rows(len(batch))
        return _when_ready(batch, lambda at: self.src.gather(src_slots[at], chunk.rows, rows[at], _pick(keys, at)))

    def scatter_step(self, batch: Batch, chunk: StagingChunk, arrived: IntArray) -> Step:
        """Second step of a staged route: those rows of the chunk that arrived, to the destination."""
        _, dst_slots, keys = _slices(batch)
        return lambda at: self.dst.scatter(dst_slots[arrived[at]], chunk.rows, arrived[at], _pick(keys, arrived[at]))


def _when_ready(batch: Batch, step: Step) -> Step:
    ready = batch.pending.job.ready
    if ready is None:
        return step

    def after_ready(at: npt.NDArray[np.int64]) -> BoolArray:
        ready()
        return step(at)

    return after_ready


def _by_layer(pool: LayerWise, watcher: LayerWatcher, slots: IntArray, slabs: ByteArray, rows: IntArray) -> BoolArray:
    for layer in range(pool.layout.num_layers):
        pool.scatter_layer(layer, slots, slabs, rows)
        watcher.arrived(layer)
    return np.ones(len(slots), dtype=np.bool_)


def _slices(batch: Batch) -> tuple[IntArray, IntArray, ByteArray | None]:
    job, part = batch.pending.job, slice(batch.start, batch.stop)
    return job.src_slots[part], job.dst_slots[part], None if job.keys is None else job.keys[part]


def _pick(keys: ByteArray | None, at: np.ndarray) -> ByteArray | None:
    return None if keys is None else keys[at]
