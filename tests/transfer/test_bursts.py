"""How many blocks go as one burst."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from tests.pools.blocks import LAYOUT, NUM_SLOTS, dram_pool, nvme_pool, tensor_pool

from dflash2.pools.base import BlockPool
from dflash2.transfer.base import CopyJob, burst_blocks
from dflash2.transfer.engine import ThreadedTransferEngine
from dflash2.types import MIB, BoolArray, ByteArray, IntArray, Tier, Urgency


@pytest.mark.parametrize(("block_bytes", "blocks"), [(64 * 1024, 256), (512 * 1024, 32), (MIB, 32), (4 * MIB, 32)])
def test_small_blocks_go_in_longer_bursts(block_bytes: int, blocks: int) -> None:
    assert burst_blocks(32, block_bytes) == blocks


class Counting:
    """A pool that notes how many blocks each call stores."""

    def __init__(self, inner: BlockPool) -> None:
        self._inner = inner
        self.tier, self.num_slots, self.layout = inner.tier, inner.num_slots, inner.layout
        self.calls: list[int] = []

    def gather(self, slots: IntArray, buffer: ByteArray, rows: IntArray, keys: ByteArray | None = None) -> BoolArray:
        return self._inner.gather(slots, buffer, rows, keys)

    def scatter(self, slots: IntArray, buffer: ByteArray, rows: IntArray, keys: ByteArray | None = None) -> BoolArray:
        self.calls.append(len(slots))
        return self._inner.scatter(slots, buffer, rows, keys)

    def close(self) -> None:
        self._inner.close()


def test_the_engine_moves_bursts_of_that_size(tmp_path: Path) -> None:
    hbm, nvme = Counting(tensor_pool(tmp_path)), Counting(nvme_pool(tmp_path))
    pools: dict[Tier, BlockPool] = {Tier.HBM: hbm, Tier.DRAM: dram_pool(tmp_path), Tier.NVME: nvme}
    engine = ThreadedTransferEngine(pools, 64 * LAYOUT.stride_bytes, swap_batch_size=4)
    slots = np.arange(NUM_SLOTS, dtype=np.int32)
    jobs = [CopyJob(Tier.DRAM, dst, slots, slots, Urgency.DEMOTION) for dst in (Tier.HBM, Tier.NVME)]
    assert engine.wait([engine.submit(job) for job in jobs], 60.0)
    assert all(done.ok.all() for done in engine.poll())
    assert hbm.calls == [NUM_SLOTS]
    assert nvme.calls == [NUM_SLOTS]
    engine.close(10.0)
    for pool in pools.values():
        pool.close()
