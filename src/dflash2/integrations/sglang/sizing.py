"""How much of the device the KV pool gets (SPEC 2.5)."""

from __future__ import annotations

from dflash2.config import Config
from dflash2.integrations.sglang.errors import refuse
from dflash2.pools.tensor import total_device_bytes
from dflash2.types import MIB


def kv_budget_bytes(config: Config, device: str, found: int) -> int:
    """Bytes for the KV pool.

    Args:
        config: the configuration.
        device: torch device type.
        found: what SGLang would take by itself; what a device without memory of its own (CPU) gets unless
            ``memory.hbm_capacity_mb`` says otherwise.
    """
    cap = config.memory.hbm_capacity_mb
    total = total_device_bytes(device)
    if total is None:
        return found if cap is None else cap * MIB
    budget = total - config.memory.hbm_reserve_mb * MIB
    if budget <= 0:
        refuse(f"memory.hbm_reserve_mb leaves nothing of a device of {total // MIB} MiB")
    return budget if cap is None else min(budget, cap * MIB)
