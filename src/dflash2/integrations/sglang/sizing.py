"""How much of the device the KV pool gets (SPEC 2.5)."""

from __future__ import annotations

from dflash2.config import Config
from dflash2.integrations.sglang.errors import refuse
from dflash2.pools.tensor import free_device_bytes, total_device_bytes
from dflash2.types import MIB

STAGING_BUFFERS = 2
"""One in each direction (``transfer.cuda_copy``)."""


def kv_budget_bytes(config: Config, device: str, found: int, token_bytes: int, page_tokens: int) -> int:
    """Bytes for the KV pool.

    Args:
        config: the configuration.
        device: torch device type.
        found: what SGLang would take by itself; what a device without memory of its own (CPU) gets unless
            ``memory.hbm_capacity_mb`` says otherwise.
        token_bytes: KV of one token on this rank.
        page_tokens: tokens of a page.
    """
    cap = config.memory.hbm_capacity_mb
    total, free = total_device_bytes(device), free_device_bytes(device)
    if total is None or free is None:
        return found if cap is None else cap * MIB
    staging = STAGING_BUFFERS * config.policy.swap_batch_size * page_tokens * token_bytes
    budget = total - config.memory.hbm_reserve_mb * MIB - staging
    if cap is not None:
        budget = min(budget, cap * MIB)
    if budget <= 0:
        refuse(
            f"memory.hbm_reserve_mb and {staging // MIB} MiB of device staging leave nothing of a device of "
            f"{total // MIB} MiB"
        )
    if budget > free - staging:
        refuse(
            f"{budget // MIB} MiB for KV and {staging // MIB} MiB of staging were asked for, but weights and others "
            f"hold all but {free // MIB} MiB of the device: raise memory.hbm_reserve_mb, or set memory.hbm_capacity_mb"
        )
    return budget
