"""The three settings that the demo compares, sized from the chats."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dflash2.config import Config, KVBlockConfig, MemoryConfig, SchedulingConfig
from dflash2.types import MIB, KVLayout

PRESSURE = 4
"""KV working set over HBM pool."""
RUNNING = 2
"""Conversations that run at the same time, over those that fit HBM."""
ROOMY = 1.25
"""HBM pool over KV working set where everything fits."""
DRAM_SHARE = 2.0
"""DRAM over HBM pool: less than what spills, so that NVMe is used too."""
NVME_SHARE = 3.5
LONG_S = 3600.0
"""No request of the demo gives up: waiting is part of what is compared."""


@dataclass(frozen=True, slots=True)
class DemoSize:
    """How much the demo does."""

    num_chats: int = 12
    num_turns: int = 3
    context_tokens: int = 1472
    """Length of each conversation at its end."""
    output_tokens: int = 48
    block_size: int = 32

    @property
    def working_set_tokens(self) -> int:
        """Tokens of all conversations at their end."""
        return self.num_chats * self.context_tokens


def make_settings(size: DemoSize, layout: KVLayout, nvme_path: Path) -> dict[str, Config]:
    """Configurations by name: ``all_hbm``, ``recompute``, ``dflash2``."""
    hbm_blocks = size.num_chats // PRESSURE * layout.num_blocks(size.context_tokens)
    hbm_mb = -(-hbm_blocks * layout.block_bytes // MIB)
    working_set_mb = -(-size.working_set_tokens * layout.bytes_per_token // MIB)
    small: dict[str, Any] = {"hbm_capacity_mb": hbm_mb, "dram_capacity_mb": 0}
    large: dict[str, Any] = {"hbm_capacity_mb": int(ROOMY * working_set_mb), "dram_capacity_mb": 0}
    tiers: dict[str, Any] = {
        "hbm_capacity_mb": hbm_mb,
        "dram_capacity_mb": int(DRAM_SHARE * hbm_mb),
        "nvme_capacity_mb": int(NVME_SHARE * hbm_mb),
        "nvme_path": str(nvme_path),
        "staging_buffer_size_mb": 64,
    }
    return {
        "all_hbm": _config(large, size, enable=False),
        "recompute": _config(small, size, enable=False),
        "dflash2": _config(tiers, size, enable=True),
    }


def _config(memory: dict[str, Any], size: DemoSize, *, enable: bool) -> Config:
    return Config(
        enable=enable,
        memory=MemoryConfig.model_validate(memory),
        kv_block=KVBlockConfig(block_size=size.block_size),
        scheduling=SchedulingConfig(
            max_batch_tokens=1536,
            max_running=RUNNING * (size.num_chats // PRESSURE),
            quantum_tokens=size.output_tokens // 2,
            admission_timeout_s=LONG_S,
            smoothing=False,  # more run than fit HBM: that is what is shown
        ),
    )
