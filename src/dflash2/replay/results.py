"""What came of a replay, for people and for programs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from dflash2.replay.calibration import Bin
from dflash2.replay.device import DeviceModel
from dflash2.replay.events import Arrival
from dflash2.replay.sizes import Slots
from dflash2.types import Tier


@dataclass(frozen=True, slots=True)
class Movement:
    """Copies between tiers since the start."""

    bytes_in: int = 0
    """Towards HBM."""
    bytes_out: int = 0
    """Away from HBM."""
    nvme_blocks_written: int = 0
    nvme_blocks_read: int = 0
    prefetched: int = 0
    prefetched_used: int = 0
    """Of the blocks prefetched, those that had arrived when they were needed."""
    awaited_from_nvme: int = 0
    """Blocks that were on NVMe only when their request arrived."""
    brought_near: int = 0
    """Of these, in DRAM or HBM when it was admitted."""


@dataclass
class Outcomes:
    """One policy at one size: per request what was found, and what was moved in all."""

    hits: list[tuple[int, int, int]] = field(default_factory=list)
    """Per request, leading blocks found in HBM, DRAM and NVMe."""
    blocks: list[int] = field(default_factory=list)
    """Per request, blocks of its prompt."""
    tokens: list[tuple[int, int]] = field(default_factory=list)
    """Per request, tokens of its prompt and of one block."""
    movement: Movement = Movement()
    calibration: list[Bin] = field(default_factory=list)

    def add(self, arrival: Arrival, hits: Mapping[Tier, int]) -> None:
        self.hits.append((hits.get(Tier.HBM, 0), hits.get(Tier.DRAM, 0), hits.get(Tier.NVME, 0)))
        self.blocks.append(len(arrival.blocks))
        self.tokens.append((arrival.traits.num_prompt_tokens, arrival.block_tokens))

    @property
    def num_hits(self) -> int:
        return sum(map(sum, self.hits))

    @property
    def num_references(self) -> int:
        return sum(self.blocks)

    @property
    def prefix_hit_ratio(self) -> float:
        """Leading blocks found at arrival over all blocks of all prompts, in [0, 1]."""
        return self.num_hits / self.num_references if self.num_references else 0.0

    def hits_by_tier(self) -> dict[str, int]:
        return {tier.label: sum(found[tier] for found in self.hits) for tier in Tier}

    def ttft_s(self, device: DeviceModel, block_bytes: int) -> list[float]:
        """Modelled time to the first token of each request, without waiting for others."""
        return [
            device.ttft_s(found, prompt, block_tokens, block_bytes)
            for found, (prompt, block_tokens) in zip(self.hits, self.tokens, strict=True)
        ]


@dataclass(frozen=True, slots=True)
class Result:
    """One policy at one size."""

    policy: str
    slots: Slots
    outcomes: Outcomes
    block_bytes: int
    device: DeviceModel | None

    @property
    def capacity_blocks(self) -> int:
        return sum(self.slots.values())

    @property
    def nvme_bytes_written(self) -> int:
        return self.outcomes.movement.nvme_blocks_written * self.block_bytes

    @property
    def prefetch_accuracy(self) -> float | None:
        """Share of prefetched blocks that were used; None if there were none."""
        movement = self.outcomes.movement
        return movement.prefetched_used / movement.prefetched if movement.prefetched else None

    @property
    def brought_near(self) -> float | None:
        """Of the blocks found on NVMe, the share that was nearer at admission; None if none was there."""
        movement = self.outcomes.movement
        return movement.brought_near / movement.awaited_from_nvme if movement.awaited_from_nvme else None

    def ttft_ms(self) -> dict[str, float] | None:
        """Median, 90th and 99th percentile of the modelled TTFT; None without a device profile."""
        if self.device is None or not self.outcomes.hits:
            return None
        values = 1e3 * np.array(self.outcomes.ttft_s(self.device, self.block_bytes))
        return {f"p{share}": round(float(np.percentile(values, share)), 3) for share in (50, 90, 99)}

    def to_json(self) -> dict[str, Any]:
        outcomes, movement = self.outcomes, self.outcomes.movement
        document: dict[str, Any] = {
            "policy": self.policy,
            "capacity_blocks": self.capacity_blocks,
            "capacity_by_tier": {tier.label: size for tier, size in self.slots.items()},
            "requests": len(outcomes.hits),
            "block_refs": outcomes.num_references,
            "hit_blocks": outcomes.num_hits,
            "prefix_hit_ratio": outcomes.prefix_hit_ratio,
            "hits_by_tier": outcomes.hits_by_tier(),
            "bytes_in": movement.bytes_in,
            "bytes_out": movement.bytes_out,
            "nvme_bytes_written": self.nvme_bytes_written,
            "prefetch_accuracy": self.prefetch_accuracy,
            "nvme_hits_nearer_at_admission": self.brought_near,
            "calibration": [[b.heat, b.share_used, b.num_blocks] for b in outcomes.calibration],
        }
        ttft = self.ttft_ms()
        return document if ttft is None else document | {"modelled_ttft_ms": ttft}
