from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.conformance.transfer_suite import Pools, TransferSuite
from tests.pools.blocks import LAYOUT, POOLS

from dflash2.pools.wrappers import PoolWrapper
from dflash2.transfer.base import TransferEngine
from dflash2.transfer.engine import ThreadedTransferEngine
from dflash2.transfer.inline import InlineTransferEngine
from dflash2.types import Tier

Make = Callable[[Pools], TransferEngine]

ENGINES: dict[str, Make] = {
    "inline": InlineTransferEngine,
    "threads": lambda pools: ThreadedTransferEngine(pools, 1 << 20, swap_batch_size=4, io_threads=3),
    "one-block-of-staging": lambda pools: ThreadedTransferEngine(pools, LAYOUT.stride_bytes, 4, io_threads=2),
    "one-batch": lambda pools: ThreadedTransferEngine(pools, 1 << 30, swap_batch_size=64, io_threads=1),
}


@pytest.mark.parametrize("make", ENGINES.values(), ids=ENGINES.keys())
@pytest.mark.parametrize("hbm", ["tensor", "layer-first"])
@pytest.mark.parametrize("dram", ["addressable", "wrapped"])
class TestTransferEngines(TransferSuite):
    @pytest.fixture
    def pools(self, hbm: str, dram: str, tmp_path: Path) -> Iterator[Pools]:
        lower = POOLS["dram"](tmp_path)
        pools = {
            Tier.HBM: POOLS[hbm](tmp_path),
            Tier.DRAM: lower if dram == "addressable" else PoolWrapper(lower),
            Tier.NVME: POOLS["nvme"](tmp_path),
        }
        yield pools
        for pool in pools.values():
            pool.close()

    @pytest.fixture
    def engine(self, make: Make, pools: Pools) -> Iterator[TransferEngine]:
        engine = make(pools)
        yield engine
        engine.close(10.0)
