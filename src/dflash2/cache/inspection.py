"""A look at single blocks: which are hot and cold, and why. For people; never on the path of a step."""

from __future__ import annotations

from typing import Any

import numpy as np

from dflash2.monitoring.misses import BlockMisses
from dflash2.policy.base import PlacementPolicy
from dflash2.table.page_table import BlockState, PageTable
from dflash2.table.prefix_index import PrefixIndex
from dflash2.types import IntArray, Tier

NUM_BINS = 10
"""Bins of the histogram of heat, each 0.1 wide."""


class BlockInspector:
    """Reads page table, policy and misses of one cache.

    Args:
        table: page table.
        index: gives the keys.
        policy: explains.
        misses: per block.
    """

    def __init__(self, table: PageTable, index: PrefixIndex, policy: PlacementPolicy, misses: BlockMisses) -> None:
        self._table = table
        self._index = index
        self._policy = policy
        self._misses = misses

    def report(self, count: int, now: float) -> dict[str, Any]:
        """As JSON: ``histogram`` by tier, and the ``count`` ``hottest`` and ``coldest`` blocks, each with why.

        Heat is that of this moment. A block counts on the fastest tier that has it.
        """
        self._policy.refresh(self._table, now)
        live = self._table.live()
        heat = self._table.heat[live]
        count = min(count, len(live))
        order = np.argsort(heat, kind="stable") if count else np.empty(0, np.int64)
        return {
            "num_blocks": len(live),
            "histogram": self._histogram(live),
            "hottest": [self._block(int(at), now) for at in live[order[::-1][:count]]],
            "coldest": [self._block(int(at), now) for at in live[order[:count]]],
        }

    def _histogram(self, live: IntArray) -> dict[str, list[int]]:
        counts: dict[str, list[int]] = {}
        for tier, there in self._table.by_fastest_tier(live).items():
            heat = np.clip(self._table.heat[there], 0.0, 1.0)
            counts[tier.label] = np.histogram(heat, bins=NUM_BINS, range=(0.0, 1.0))[0].tolist()
        return counts

    def _block(self, block_id: int, now: float) -> dict[str, Any]:
        table = self._table
        one = np.array([block_id], np.int32)
        key = self._index.key_of(block_id)
        return {
            "block_id": block_id,
            "key": None if key is None else key.hex()[:16],
            "state": BlockState(int(table.state[block_id])).name.lower(),
            "heat": round(float(table.heat[block_id]), 4),
            "tiers": [tier.label for tier in Tier if table.has(one, tier)[0]],
            "position": int(table.position[block_id]),
            "holders": int(table.ref_count[block_id]),
            "pinned": bool(table.pin_count[block_id] > 0),
            "misses": self._misses.of(block_id),
            "why": self._policy.explain(table, block_id, now),
        }
