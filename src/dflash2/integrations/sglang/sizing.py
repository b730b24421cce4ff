"""How much of the device the KV pool gets (SPEC 2.5)."""

from __future__ import annotations

from dflash2.build import device_kv_bytes
from dflash2.config import Config
from dflash2.errors import CapacityError
from dflash2.integrations.sglang.errors import refuse
from dflash2.types import MIB


def kv_budget_bytes(config: Config, device: str, found: int, token_bytes: int, page_tokens: int) -> int:
    """Bytes for the KV pool; ends the process with a message where the device cannot give them.

    Args:
        config: the configuration.
        device: torch device type.
        found: what SGLang would take by itself; what a device without memory of its own (CPU) gets unless
            ``memory.hbm_capacity_mb`` says otherwise.
        token_bytes: KV of one token on this rank.
        page_tokens: tokens of a page.
    """
    try:
        budget = device_kv_bytes(config, device, page_tokens * token_bytes)
    except CapacityError as error:
        refuse(str(error))
    if budget is not None:
        return budget
    cap = config.memory.hbm_capacity_mb
    return found if cap is None else cap * MIB
