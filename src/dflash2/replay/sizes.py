"""How large the tiers of a replay are."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeAlias

from dflash2.config import Config
from dflash2.errors import ConfigError, RequestError
from dflash2.types import MIB, Tier

Slots: TypeAlias = Mapping[Tier, int]
"""Blocks of each tier; a tier that is missing has none."""


def parse_capacity(text: str) -> Slots:
    """``N`` blocks of one tier, or ``HBM/DRAM`` or ``HBM/DRAM/NVME``.

    Raises:
        RequestError: it is neither.
    """
    parts = text.split("/")
    sizes = [int(part) if part.strip().isascii() and part.strip().isdigit() else 0 for part in parts]
    if not 1 <= len(sizes) <= len(Tier) or sizes[0] < 1 or 0 in sizes[1:]:
        raise RequestError(f"{text!r} is not a number of blocks, nor HBM/DRAM/NVME in blocks", "--capacity-blocks")
    return dict(zip(Tier, sizes, strict=False))


def slots_of_config(config: Config, ranks: int, block_bytes: int) -> Slots:
    """Blocks of each tier on one rank.

    Args:
        config: its capacities must be written out, since there is no machine to ask.
        ranks: that share the machine's DRAM and NVMe.
        block_bytes: of one block of the trace, on one rank.

    Raises:
        ConfigError: a capacity is missing or holds no block.
    """
    memory = config.memory
    if memory.hbm_capacity_mb is None:
        raise ConfigError("a replay has no device to ask; write it out", "memory.hbm_capacity_mb")
    if memory.dram_capacity_mb is None:
        raise ConfigError("a replay may be of another machine; write it out", "memory.dram_capacity_mb")
    slots = {
        Tier.HBM: memory.hbm_capacity_mb * MIB // block_bytes,
        Tier.DRAM: memory.dram_capacity_mb * MIB // ranks // block_bytes,
        Tier.NVME: memory.nvme_capacity_mb * MIB // ranks // block_bytes,
    }
    if slots[Tier.HBM] < 1:
        raise ConfigError(
            f"{memory.hbm_capacity_mb} MiB hold no block of {block_bytes} bytes", "memory.hbm_capacity_mb"
        )
    return slots


def is_single(slots: Slots) -> bool:
    """There is no tier below the first."""
    return not (slots.get(Tier.DRAM) or slots.get(Tier.NVME))
