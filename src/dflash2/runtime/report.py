"""What a runtime says of itself: the line at the start, and its statistics."""

from __future__ import annotations

from typing import Any

from dflash2.config import Config
from dflash2.config.changing import running_values
from dflash2.monitoring.data_path import host_stats, nvme_stats, transfer_stats
from dflash2.pools.tensor import allocator_bytes
from dflash2.runtime.parts import RuntimeParts
from dflash2.types import Tier


class Report:
    """Reads the parts of one runtime and changes nothing.

    Args:
        parts: of the runtime.
    """

    def __init__(self, parts: RuntimeParts) -> None:
        self._parts = parts

    def startup_line(self) -> str:
        """The line of SPEC 5.2 or, when DFlash2 is off, of SPEC 5.3."""
        parts = self._parts
        if parts.fallback_reason is not None:
            return f"DFlash2: fallback, {parts.fallback_reason}"
        size = {tier: parts.cache.table.capacity(tier) * parts.layout.block_bytes for tier in Tier}
        committed = size[Tier.HBM] + size[Tier.DRAM]
        total = committed + size[Tier.NVME]
        return f"DFlash2: enabled, total virtual cache size {total / 1e9:.1f}GB, committed {committed / 1e9:.1f}GB"

    def stats(self, config: Config) -> dict[str, Any]:
        """Nested counters and gauges, JSON-able. Sizes in blocks unless the name says otherwise.

        Args:
            config: what is in effect.
        """
        parts = self._parts
        cache, table = parts.cache, parts.cache.table
        counters, regret = cache.counters, cache.regret
        return {
            "enabled": parts.fallback_reason is None,
            "block_bytes": parts.layout.block_bytes,
            "tiers": {tier.label: self._tier(tier) for tier in Tier},
            "counters": dict(counters.flat()),
            "hbm_hit_rate": counters.hbm_hit_rate,
            "prefix_hit_rate": counters.prefix_hit_rate,
            "pinned_blocks": table.num_pinned,
            "reserved_blocks": parts.ledger.num_promised,
            "copies_in_flight": cache.mover.num_in_flight,
            "prefetch_window": cache.prefetcher.window.size,
            "cold_threshold": cache.policy.cold_threshold,
            "effective_threshold": cache.policy.effective_threshold,
            "policy": running_values(config),
            "regret": {"demoted_blocks": regret.num_demoted, "regretted_blocks": regret.num_regretted},
            "transfer": transfer_stats(parts.transfer),
            "nvme": nvme_stats(parts.pools.get(Tier.NVME)),
            "host": host_stats(),
            "has_device": parts.device != "cpu",
            "allocator": allocator_bytes(parts.device),
        }

    def _tier(self, tier: Tier) -> dict[str, int]:
        table = self._parts.cache.table
        return {
            "capacity_blocks": table.capacity(tier),
            "used_blocks": table.num_used(tier),
            "retired_blocks": table.tiers[tier].num_retired,
            "pool_bytes": table.capacity(tier) * self._parts.layout.block_bytes,
        }
