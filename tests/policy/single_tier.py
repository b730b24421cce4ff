"""One tier of blocks with integers for content, and nothing but a policy to say what stays."""

from __future__ import annotations

import numpy as np

from dflash2.policy.base import Outcome, PlacementPolicy, RequestTraits
from dflash2.table.page_table import BlockState, PageTable
from dflash2.types import IntArray, Tier

SPARE = 256


class SingleTier:
    """Serves requests whole, at the moment they arrive; then gives up what is above the capacity.

    Attributes:
        victims: what was given up, in order.
    """

    def __init__(self, policy: PlacementPolicy, capacity: int) -> None:
        self.policy = policy
        self.capacity = capacity
        self.table = PageTable({Tier.HBM: capacity + SPARE})
        self.row_of: dict[int, int] = {}
        self.victims: list[int] = []
        self._content = np.zeros(capacity + SPARE, np.int64)

    def arrive(self, name: str, blocks: list[int], now: float, session: str | None = None) -> int:
        """Leading blocks that were there."""
        hits = next((index for index, block in enumerate(blocks) if block not in self.row_of), len(blocks))
        traits = RequestTraits(session=session, num_prompt_tokens=16 * len(blocks))
        self.policy.on_arrival(name, traits, blocks, now)
        present = np.array([self.row_of[block] for block in blocks if block in self.row_of], np.int32)
        new = [block for block in blocks if block not in self.row_of]
        rows = self.table.try_allocate(len(new))
        assert rows is not None
        self.row_of.update(zip(new, rows.tolist(), strict=True))
        self._content[rows] = new
        self.table.state[rows] = BlockState.PUBLISHED
        self.table.position[rows] = [blocks.index(block) for block in new]
        self.policy.on_use(self.table, present, now, name)
        self.policy.on_allocate(self.table, rows, now, name)
        self._trim(now)
        return hits

    def finish(self, name: str, now: float, stop_reason: str | None = None, num_output_tokens: int = 20) -> None:
        self.policy.on_finish(name, Outcome(stop_reason, num_output_tokens), now)

    def rows(self) -> IntArray:
        return np.array(sorted(self.row_of.values()), np.int32)

    def _trim(self, now: float) -> None:
        above = len(self.row_of) - self.capacity
        gone = self.policy.order(self.table, self.rows(), above, now)
        assert len(gone) == max(0, above) == len(set(gone.tolist()))
        for block in self._content[gone].tolist():
            del self.row_of[block]
            self.victims.append(block)
        self.table.free(gone)
