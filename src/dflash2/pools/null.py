"""A pool that holds no bytes: for replays, which drive the real table and policy without any KV."""

from __future__ import annotations

import numpy as np

from dflash2.types import BoolArray, ByteArray, IntArray, KVLayout, Tier


class NullPool:
    """Accepts and returns blocks of no content; every copy succeeds.

    Args:
        tier: which tier it stands for.
        num_slots: capacity in blocks.
        layout: shape of a block (only its sizes are used, for byte counts).
    """

    def __init__(self, tier: Tier, num_slots: int, layout: KVLayout) -> None:
        self.tier = tier
        self.num_slots = num_slots
        self.layout = layout

    @property
    def slabs(self) -> ByteArray:
        """A read-only array of the right shape that takes no memory, so that no copy between such pools is staged."""
        return np.broadcast_to(np.zeros((), dtype=np.uint8), (self.num_slots, self.layout.stride_bytes))

    def gather(self, slots: IntArray, buffer: ByteArray, rows: IntArray, keys: ByteArray | None = None) -> BoolArray:
        """Leave the rows as they are."""
        return np.ones(len(slots), dtype=np.bool_)

    def scatter(self, slots: IntArray, buffer: ByteArray, rows: IntArray, keys: ByteArray | None = None) -> BoolArray:
        """Forget the rows."""
        return np.ones(len(slots), dtype=np.bool_)

    def close(self) -> None:
        """Nothing to give back."""
