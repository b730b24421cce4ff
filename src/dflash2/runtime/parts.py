"""What a runtime is put together from."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dflash2.cache.manager import CacheManager
from dflash2.cache.rebalance import Rebalancer
from dflash2.cache.reservation import ReservationLedger
from dflash2.config import Config
from dflash2.monitoring.history import History
from dflash2.pools.base import BlockPool
from dflash2.transfer.base import TransferEngine
from dflash2.types import KVLayout, Tier


@dataclass(frozen=True, slots=True)
class RuntimeParts:
    """What ``build`` puts together for a runtime."""

    config: Config
    layout: KVLayout
    hbm_tensor: Any
    pools: dict[Tier, BlockPool]
    transfer: TransferEngine
    cache: CacheManager
    ledger: ReservationLedger
    rebalancer: Rebalancer
    fallback_reason: str | None
    """Why DFlash2 is off and this is a plain cache in HBM; None when it is on."""
    history: History | None = None
    device: str = "cpu"
    policy_file: Path | None = None
    """Where what the policy has learned is kept between two runs."""
