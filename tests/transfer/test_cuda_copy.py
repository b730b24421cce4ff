"""The CUDA copier's kernel and plans, run by Triton's interpreter where there is no GPU."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch

os.environ.setdefault("TRITON_INTERPRET", "1")  # read when the kernel is decorated, so before the import below
pytest.importorskip("triton")

from tests.conformance.pool_suite import PoolSuite
from tests.pools.blocks import LAYOUT, NUM_SLOTS, assert_blocks, write_blocks

from dflash2.pools.base import BlockPool
from dflash2.pools.tensor import LayerFirstPool, TensorPool
from dflash2.transfer.cuda_copy import CudaCopier
from dflash2.types import KVLayout


class TestInterpretedKernel(PoolSuite):
    @pytest.fixture(params=["block", "layer"])
    def pool(self, request: pytest.FixtureRequest) -> Iterator[BlockPool]:
        copier = CudaCopier("cpu", batch_blocks=3, block_bytes=LAYOUT.block_bytes)
        if request.param == "block":
            yield TensorPool(NUM_SLOTS, LAYOUT, copier)
            return
        shape = (NUM_SLOTS, LAYOUT.block_size, LAYOUT.num_kv_heads, LAYOUT.head_dim)
        tensors = [[torch.zeros(shape) for _ in range(LAYOUT.num_layers)] for _ in range(2)]
        yield LayerFirstPool(tensors[0], tensors[1], LAYOUT, copier)

    # Triton's interpreter patches its language module for the time of a launch and knows no threads.
    test_threads_on_different_slots_do_not_disturb_each_other = None


@pytest.mark.parametrize("dtype", ["bfloat16", "uint8", "float32"])
@pytest.mark.parametrize("head_dim", [5, 7, 512])
def test_pieces_of_any_width(dtype: str, head_dim: int) -> None:
    """Odd widths take narrow words, wide ones several programs a piece."""
    layout = KVLayout(num_layers=3, num_kv_heads=1, head_dim=head_dim, block_size=3, dtype=dtype)
    shape = (6, 3, 1, head_dim)
    tensors = [[torch.zeros(shape, dtype=getattr(torch, dtype)) for _ in range(3)] for _ in range(2)]
    pool = LayerFirstPool(tensors[0], tensors[1], layout, CudaCopier("cpu", 4, layout.block_bytes))
    write_blocks(pool, range(6), range(6))
    write_blocks(pool, [4, 1], [40, 10])
    assert_blocks(pool, range(6), [0, 10, 2, 3, 40, 5])
