"""The data path on a real CUDA device: the suites that the CPU pools pass, and page-locked memory."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")
if not torch.cuda.is_available():
    pytest.skip("no CUDA device", allow_module_level=True)

from tests.conformance.pool_suite import PoolSuite
from tests.conformance.transfer_suite import Pools, TransferSuite
from tests.pools.blocks import LAYOUT, NUM_SLOTS, nvme_pool

from dflash2.pools.base import BlockPool
from dflash2.pools.dram import DramPool
from dflash2.pools.tensor import LayerFirstPool, TensorPool
from dflash2.transfer.base import TransferEngine
from dflash2.transfer.cuda_copy import CudaCopier, page_lock
from dflash2.transfer.engine import ThreadedTransferEngine
from dflash2.types import Tier


def cuda_pool(kind: str) -> BlockPool:
    copier = CudaCopier("cuda", batch_blocks=3, block_bytes=LAYOUT.block_bytes)
    if kind == "block":
        return TensorPool(NUM_SLOTS, LAYOUT, copier, "cuda")
    shape = (NUM_SLOTS, LAYOUT.block_size, LAYOUT.num_kv_heads, LAYOUT.head_dim)
    tensors = [[torch.zeros(shape, device="cuda") for _ in range(LAYOUT.num_layers)] for _ in range(2)]
    return LayerFirstPool(tensors[0], tensors[1], LAYOUT, copier)


@pytest.mark.parametrize("kind", ["block", "layer"])
class TestCudaPools(PoolSuite):
    @pytest.fixture
    def pool(self, kind: str) -> Iterator[BlockPool]:
        pool = cuda_pool(kind)
        yield pool
        pool.close()


@pytest.mark.parametrize("kind", ["block", "layer"])
class TestCudaTransfer(TransferSuite):
    @pytest.fixture
    def pools(self, kind: str, tmp_path: Path) -> Iterator[Pools]:
        pools = {
            Tier.HBM: cuda_pool(kind),
            Tier.DRAM: DramPool(NUM_SLOTS, LAYOUT, page_lock),
            Tier.NVME: nvme_pool(tmp_path),
        }
        yield pools
        for pool in pools.values():
            pool.close()

    @pytest.fixture
    def engine(self, pools: Pools) -> Iterator[TransferEngine]:
        engine = ThreadedTransferEngine(pools, 1 << 20, 4, copy_threads=1, page_lock=page_lock)
        yield engine
        engine.close(10.0)
