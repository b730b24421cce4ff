"""Plain vocabulary shared by every layer: tiers, the shape of a KV block, array aliases. No torch here."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, IntEnum
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

IntArray: TypeAlias = npt.NDArray[np.int32]
"""int32 vector: block ids, slots, token ids or positions (the name of the variable says which)."""
BoolArray: TypeAlias = npt.NDArray[np.bool_]
FloatArray: TypeAlias = npt.NDArray[np.float32]
ByteArray: TypeAlias = npt.NDArray[np.uint8]

MIB = 1024 * 1024
PAGE_BYTES = 4096
"""Alignment of every DRAM slab and NVMe slot, so that a DRAM slab is a valid O_DIRECT buffer."""

KEY_BYTES = 32
"""Length of a block_key (BLAKE2b-256)."""

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3fn": 1, "float8_e5m2": 1, "uint8": 1}


class Tier(IntEnum):
    """Where bytes can be. Smaller is faster; the value is the column in the page table."""

    HBM = 0
    DRAM = 1
    NVME = 2

    @property
    def label(self) -> str:
        """Lower-case name, as metrics and log lines spell it."""
        return self.name.lower()


class Urgency(Enum):
    """Why bytes move; three separate budgets (invariant 7)."""

    DEMAND = "demand"
    """A step or an admitted request waits for it."""
    DEMOTION = "demotion"
    """Makes room; must never wait for speculation."""
    SPECULATIVE = "speculative"
    """Prefetch and early copies; the first to wait and to be cancelled."""


@dataclass(frozen=True, slots=True)
class KVLayout:
    """Shape of one block's K and V on one rank.

    In HBM (block-contiguous) the pool is one tensor
    ``[num_slots, num_layers, 2, block_size, num_kv_heads, head_dim]`` (2 = K, V); below it a block is
    the same bytes in the same order, padded at the end to ``stride_bytes``.
    """

    num_layers: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    """Tokens per block."""
    dtype: str
    """A key of ``DTYPE_BYTES``."""

    @property
    def bytes_per_token(self) -> int:
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * DTYPE_BYTES[self.dtype]

    @property
    def block_bytes(self) -> int:
        """Payload of one block."""
        return self.bytes_per_token * self.block_size

    @property
    def stride_bytes(self) -> int:
        """Distance between two blocks on DRAM and NVMe: the payload rounded up to ``PAGE_BYTES``."""
        return -(-self.block_bytes // PAGE_BYTES) * PAGE_BYTES

    @property
    def block_shape(self) -> tuple[int, int, int, int, int]:
        return (self.num_layers, 2, self.block_size, self.num_kv_heads, self.head_dim)

    def num_blocks(self, num_tokens: int) -> int:
        """Blocks that ``num_tokens`` tokens occupy (the last one may be partial)."""
        return -(-num_tokens // self.block_size)


TIERS_BELOW_HBM = (Tier.DRAM, Tier.NVME)
