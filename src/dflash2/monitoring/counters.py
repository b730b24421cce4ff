"""Everything that is counted, in one place: plain integers, written by one thread, read by anybody."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from dflash2.types import Tier


def _per_tier() -> dict[Tier, int]:
    return dict.fromkeys(Tier, 0)


@dataclass(slots=True)
class CacheCounters:
    """Counters of one cache manager since its start."""

    looked_up_tokens: int = 0
    hit_tokens: dict[Tier, int] = field(default_factory=_per_tier)
    """Prefix hits by the tier where the block was when its request arrived."""
    joined_tokens: int = 0
    """Prompt tokens that another request computed while this one waited for its turn."""
    used_blocks: int = 0
    """Uses of blocks whose KV exists on some tier."""
    used_in_hbm_blocks: int = 0
    """Of these, in HBM when needed."""
    swap_in_blocks: int = 0
    swap_out_blocks: int = 0
    swap_in_bytes: int = 0
    swap_out_bytes: int = 0
    demoted_to_nvme_blocks: int = 0
    loaded_from_nvme_blocks: int = 0
    freed_clean_blocks: int = 0
    """HBM slots given up without a copy because one lay below already."""
    dropped_blocks: int = 0
    """Cached blocks given up for good because all tiers were full."""
    failed_copies: int = 0
    lost_blocks: int = 0
    """Blocks whose last copy could not be read or verified; recomputed if needed."""
    computed_tokens: int = 0
    recomputed_tokens: int = 0
    """Tokens of full blocks whose block_key had been computed before."""
    published_blocks: int = 0
    prefetch_issued_blocks: int = 0
    prefetch_used_blocks: int = 0
    prefetch_late_blocks: int = 0
    prefetch_wasted_blocks: int = 0
    reservations: int = 0
    reservations_refused: int = 0
    """Requests that found no room for their reservation, once for each wait."""

    @property
    def num_missed_blocks(self) -> int:
        """Uses of existing blocks that were not in HBM when needed."""
        return self.used_blocks - self.used_in_hbm_blocks

    @property
    def hbm_hit_rate(self) -> float:
        """Share of uses of existing blocks that were in HBM when needed; 1.0 before any use (R-3.6)."""
        return self.used_in_hbm_blocks / self.used_blocks if self.used_blocks else 1.0

    @property
    def prefix_hit_rate(self) -> float:
        """Hit tokens over looked-up tokens; 0.0 before any lookup."""
        return sum(self.hit_tokens.values()) / self.looked_up_tokens if self.looked_up_tokens else 0.0

    def flat(self) -> Iterator[tuple[str, int]]:
        """(name, value) of every integer counter; per-tier ones as ``name_tier``."""
        for name in self.__slots__:
            value = getattr(self, name)
            if isinstance(value, dict):
                yield from ((f"{name}_{tier.label}", count) for tier, count in value.items())
            else:
                yield name, value
