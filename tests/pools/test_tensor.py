from __future__ import annotations

import numpy as np
import pytest
import torch
from tests.pools.blocks import LAYOUT, payload, read_blocks, write_blocks

from dflash2.pools.tensor import LayerFirstPool, TensorPool, _PiecesPool
from dflash2.transfer.cpu_copy import CpuCopier
from dflash2.types import KVLayout


def test_the_tensor_is_read_in_place_with_the_documented_shape() -> None:
    pool = TensorPool(4, LAYOUT, CpuCopier())
    assert tuple(pool.tensor.shape) == (4, *LAYOUT.block_shape)
    assert pool.tensor.dtype == torch.float32
    write_blocks(pool, [2], [9])
    assert np.array_equal(pool.tensor[2].contiguous().view(torch.uint8).numpy().ravel(), payload(9))
    address = pool.tensor.data_ptr()
    write_blocks(pool, [0, 3], [1, 2])
    assert pool.tensor.data_ptr() == address


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float8_e4m3fn", "uint8"])
def test_any_dtype_keeps_its_bytes(dtype: str) -> None:
    layout = KVLayout(num_layers=1, num_kv_heads=3, head_dim=5, block_size=3, dtype=dtype)  # not a multiple of 8 bytes
    pool = TensorPool(6, layout, CpuCopier())
    write_blocks(pool, [5, 1, 3], [5, 1, 3])
    for slot, found in zip([1, 3, 5], read_blocks(pool, [1, 3, 5]), strict=True):
        assert found is not None
        assert np.array_equal(found, payload(slot, layout))


def test_layer_first_blocks_have_the_order_of_the_layout() -> None:
    """A block written to a block-contiguous pool and one written to a layer-first pool are the same tensor."""
    tail = (LAYOUT.num_kv_heads, LAYOUT.head_dim)
    keys = [torch.zeros(8 * LAYOUT.block_size, *tail) for _ in range(LAYOUT.num_layers)]
    values = [torch.zeros(8 * LAYOUT.block_size, *tail) for _ in range(LAYOUT.num_layers)]
    layered, plain = LayerFirstPool(keys, values, LAYOUT, CpuCopier()), TensorPool(8, LAYOUT, CpuCopier())
    for pool in (layered, plain):
        write_blocks(pool, [6, 2], [1, 2])
    for slot in (6, 2):
        tokens = slice(slot * LAYOUT.block_size, (slot + 1) * LAYOUT.block_size)
        for layer in range(LAYOUT.num_layers):
            for side, tensors in enumerate((keys, values)):
                got = tensors[layer][tokens].contiguous().view(torch.uint8)
                assert torch.equal(got, plain.tensor[slot, layer, side].contiguous().view(torch.uint8))


def test_layer_first_tensors_that_do_not_fit_are_refused() -> None:
    good = [torch.zeros(16, 4, 3, 5) for _ in range(2)]
    with pytest.raises(ValueError, match="expected 2 tensors"):
        LayerFirstPool(good[:1], good, LAYOUT, CpuCopier())
    with pytest.raises(ValueError, match="does not hold"):
        LayerFirstPool(good, [torch.zeros(9, 4, 3, 5)] * 2, LAYOUT, CpuCopier())
    with pytest.raises(ValueError, match="contiguous"):
        LayerFirstPool(good, [torch.zeros(16, 3, 4, 5).transpose(1, 2)] * 2, LAYOUT, CpuCopier())


def test_pieces_whose_rows_lie_differently_far_apart_are_refused() -> None:
    """A copier is told one distance for all."""
    width = LAYOUT.block_bytes // 2
    near, far = torch.zeros(4, width, dtype=torch.uint8), torch.zeros(4, 2 * width, dtype=torch.uint8)[:, :width]
    with pytest.raises(ValueError, match="equally far apart"):
        _PiecesPool(4, LAYOUT, [near, far], CpuCopier())
