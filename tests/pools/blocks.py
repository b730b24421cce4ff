"""Blocks whose bytes follow from an integer key, so that contamination shows; small pools of every kind."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
from tests.pools import payloads
from tests.pools.payloads import FINGERPRINT, keys_of, slots_of

from dflash2.pools.base import BlockPool
from dflash2.pools.dram import DramPool
from dflash2.pools.fileops import OsFileOps
from dflash2.pools.nvme import NvmeOptions, NvmePool
from dflash2.pools.page_memory import PageMemory
from dflash2.pools.tensor import LayerFirstPool, TensorPool
from dflash2.transfer.cpu_copy import CpuCopier
from dflash2.types import ByteArray, KVLayout

LAYOUT = KVLayout(num_layers=2, num_kv_heads=3, head_dim=5, block_size=4, dtype="float32")
"""960 bytes a block: neither a page nor a power of two."""
NUM_SLOTS = 16


def payload(key: int, layout: KVLayout = LAYOUT) -> ByteArray:
    """The bytes of the block ``key``."""
    return payloads.payload(key, layout)


def new_rows(count: int, layout: KVLayout = LAYOUT) -> ByteArray:
    """A page-aligned buffer of ``count`` rows, filled with 0xEE."""
    rows = PageMemory(max(1, count) * layout.stride_bytes).bytes[: count * layout.stride_bytes]
    rows[:] = 0xEE
    return rows.reshape(count, layout.stride_bytes)


def write_blocks(pool: BlockPool, slots: Sequence[int], keys: Sequence[int], with_keys: bool = True) -> list[bool]:
    """Store the blocks ``keys`` at ``slots``; which of them were stored."""
    rows = new_rows(len(slots), pool.layout)
    for row, key in enumerate(keys):
        rows[row, : pool.layout.block_bytes] = payload(key, pool.layout)
    at = slots_of(range(len(slots)))
    return list(pool.scatter(slots_of(slots), rows, at, keys_of(keys) if with_keys else None).tolist())


def read_blocks(pool: BlockPool, slots: Sequence[int], keys: Sequence[int] | None = None) -> list[ByteArray | None]:
    """The payloads at ``slots``; None where the pool could not give one."""
    rows = new_rows(len(slots), pool.layout)
    at = slots_of(range(len(slots)))
    ok = pool.gather(slots_of(slots), rows, at, None if keys is None else keys_of(keys))
    return [rows[i, : pool.layout.block_bytes].copy() if ok[i] else None for i in range(len(slots))]


def assert_blocks(pool: BlockPool, slots: Sequence[int], keys: Sequence[int]) -> None:
    """Every slot holds exactly its block."""
    for slot, key, found in zip(slots, keys, read_blocks(pool, slots), strict=True):
        assert found is not None, f"slot {slot} of {pool.tier.label} cannot be read"
        assert np.array_equal(found, payload(key, pool.layout)), f"slot {slot} does not hold block {key}"


def nvme_pool(
    path: Path,
    num_slots: int = NUM_SLOTS,
    layout: KVLayout = LAYOUT,
    name: str = "rank0",
    fingerprint: bytes = FINGERPRINT,
    options: NvmeOptions | None = None,
) -> NvmePool:
    return NvmePool([path], name, num_slots, layout, fingerprint, options)


def tensor_pool(path: Path) -> BlockPool:
    return TensorPool(NUM_SLOTS, LAYOUT, CpuCopier())


def numpy_tensor_pool(path: Path) -> BlockPool:
    return TensorPool(NUM_SLOTS, LAYOUT, CpuCopier(native=False))


def layer_first_pool(path: Path, native: bool = True) -> BlockPool:
    """Per layer ``[slots * tokens, heads, dim]`` for K and ``[slots, tokens, heads, dim]`` for V: both are accepted."""
    tail = (LAYOUT.num_kv_heads, LAYOUT.head_dim)
    keys = [torch.zeros(NUM_SLOTS * LAYOUT.block_size, *tail) for _ in range(LAYOUT.num_layers)]
    values = [torch.zeros(NUM_SLOTS, LAYOUT.block_size, *tail) for _ in range(LAYOUT.num_layers)]
    return LayerFirstPool(keys, values, LAYOUT, CpuCopier(native))


def numpy_layer_first_pool(path: Path) -> BlockPool:
    return layer_first_pool(path, native=False)


def dram_pool(path: Path) -> BlockPool:
    return DramPool(NUM_SLOTS, LAYOUT)


def striped_nvme_pool(path: Path) -> BlockPool:
    folders = [path / name for name in ("a", "b", "c")]
    for folder in folders:
        folder.mkdir()
    return NvmePool(folders, "rank0", NUM_SLOTS, LAYOUT, FINGERPRINT)


def buffered_nvme_pool(path: Path) -> BlockPool:
    return nvme_pool(path, options=NvmeOptions(direct_io=False))


class PlainFileOps(OsFileOps):
    """The operating system too, but nothing that the native library may take for it."""


def python_nvme_pool(path: Path) -> BlockPool:
    return nvme_pool(path, options=NvmeOptions(files=PlainFileOps()))


POOLS: dict[str, Callable[[Path], BlockPool]] = {
    "tensor": tensor_pool,
    "layer-first": layer_first_pool,
    "tensor-numpy": numpy_tensor_pool,
    "layer-first-numpy": numpy_layer_first_pool,
    "dram": dram_pool,
    "nvme": nvme_pool,
    "nvme-python": python_nvme_pool,
    "nvme-striped": striped_nvme_pool,
    "nvme-buffered": buffered_nvme_pool,
}
