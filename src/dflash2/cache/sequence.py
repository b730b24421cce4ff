"""One request's blocks."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

import numpy as np

from dflash2.types import IntArray


class Residency(Enum):
    """Where a sequence stands between two steps."""

    PAUSED = "paused"
    """Not pinned; its blocks may be on any tier."""
    ENTERING = "entering"
    """Pinned; some blocks are still on their way to HBM."""
    RESIDENT = "resident"
    """Pinned and complete in HBM: a step may read it."""


@dataclass(slots=True, eq=False)
class Sequence:
    """Block table and computed tokens of one request. Made and changed by the cache manager only.

    Attributes:
        request_id: the engine's name for it.
        root: parent key of its first block (namespace, adapter, tenant).
        block_ids: int32 ``[n]``, in order.
        hbm_slots: int32 ``[n]``, HBM slot of each block; valid while RESIDENT.
        keys: block_key of each full block.
        residency: see ``Residency``.
        growth_blocks: HBM blocks promised to it while it is pinned, not taken yet.
        writable_tokens: tokens up to which steps may write without another look at the table; 0 while there is none.
            Every block from the tail on is then OPEN, pinned, held by this sequence alone, and no copy of it is begun.
        num_cached_tokens: prompt tokens that were found when it was opened.
        entered_s: when it began to enter, for the deadline.
        promise: id of the reservation that it lives on, the same for all its forks; None if it has none.
    """

    request_id: str
    root: bytes
    block_ids: IntArray = field(default_factory=lambda: np.empty(0, np.int32))
    hbm_slots: IntArray = field(default_factory=lambda: np.empty(0, np.int32))
    keys: list[bytes] = field(default_factory=list)
    residency: Residency = Residency.PAUSED
    growth_blocks: int = 0
    writable_tokens: int = 0
    num_cached_tokens: int = 0
    entered_s: float = 0.0
    promise: str | None = None
    closed: bool = False
    num_tokens: int = 0
    """Tokens whose KV exists."""
    _tokens: IntArray = field(default_factory=lambda: np.empty(64, np.int32))
    _owns_tokens: bool = True

    @property
    def tokens(self) -> IntArray:
        """int32 ``[num_tokens]``, a view: the tokens whose KV exists."""
        return self._tokens[: self.num_tokens]

    @property
    def last_key(self) -> bytes:
        """Key of the last full block, or the root: parent of the next one."""
        return self.keys[-1] if self.keys else self.root

    def read_from(self, buffer: IntArray) -> None:
        """Keep no copy of the tokens, but refer to ``buffer``.

        Args:
            buffer: int32; this sequence's tokens stand at its beginning, and those that follow will stand behind them
                when ``append_tokens`` is called with them.
        """
        self._tokens = buffer
        self._owns_tokens = False

    def append_tokens(self, token_ids: IntArray) -> int:
        """The KV of these tokens exists from now on; returns how many they are."""
        count = len(token_ids)
        end = self.num_tokens + count
        if not self._owns_tokens:
            self.num_tokens = end
            return count
        if end > len(self._tokens):
            grown = np.empty(max(end, 2 * len(self._tokens)), np.int32)
            grown[: self.num_tokens] = self.tokens
            self._tokens = grown
        if count == 1:  # a decode step, 128 times: a slice would take three times as long
            self._tokens[self.num_tokens] = token_ids[0]
        else:
            self._tokens[self.num_tokens : end] = token_ids
        self.num_tokens = end
        return count

    def keep_tokens(self, num_tokens: int) -> None:
        """Forget all tokens behind the first ``num_tokens``."""
        self.num_tokens = min(self.num_tokens, num_tokens)
