"""Promises to open sequences: how large one has to be, and which sequences live on it."""

from __future__ import annotations

from collections import Counter

import numpy as np

from dflash2.cache.manager import CacheManager
from dflash2.cache.reservation import ReservationLedger
from dflash2.cache.sequence import Sequence
from dflash2.types import IntArray, KVLayout


class SequencePromises:
    """Keeps the ledger in step with the sequences that are open.

    Args:
        cache: whose sequences these are.
        ledger: of what is promised.
        layout: shape of a block.
    """

    def __init__(self, cache: CacheManager, ledger: ReservationLedger, layout: KVLayout) -> None:
        self._cache = cache
        self._ledger = ledger
        self._layout = layout
        self._holders: Counter[str] = Counter()
        """How many open sequences live on each promise."""

    def needed_blocks(self, num_prompt_tokens: int, max_new_tokens: int, num_branches: int = 1) -> tuple[int, int]:
        """Blocks that one branch needs in HBM at one time, and that all have together at their ends.

        Branches share the prompt's full blocks. One that writes to a shared block needs its copy beside it.
        """
        one = self._cache.residency.blocks_for(num_prompt_tokens + max_new_tokens)
        shared = num_prompt_tokens // self._layout.block_size
        return one + int(num_branches > 1), shared + num_branches * (one - shared)

    def try_extend(self, sequence: Sequence, num_tokens: int) -> int | None:
        """Raise the promise of a sequence without branches so that it may become ``num_tokens`` long.

        Returns:
            Blocks added; None, and no change, if they are not to be had now.
        """
        promise = sequence.promise
        if promise is None:
            return 0
        before = self._ledger.promised_to(promise)
        if not self._ledger.try_extend(promise, self._layout.num_blocks(num_tokens)):
            return None
        return self._ledger.promised_to(promise) - before

    def give_back(self, sequence: Sequence, num_tokens: int) -> int:
        """Lower the promise of a sequence without branches to ``num_tokens``, but not below what it has.

        Returns:
            Blocks given back.
        """
        if sequence.promise is None:
            return 0
        needed = max(self._layout.num_blocks(num_tokens), len(sequence.block_ids) + sequence.growth_blocks)
        return self._ledger.give_back(sequence.promise, needed)

    def cover_copies(self, sequence: Sequence, cut: IntArray) -> None:
        """A fork that computes blocks again which its sisters keep needs room for them beside theirs.

        If it is not to be had, the fork waits for room like everybody.
        """
        kept = int(np.count_nonzero(self._cache.table.ref_count[cut]))
        if kept and sequence.promise is not None:
            whole = min(self._ledger.promised_to(sequence.promise) + kept, self._ledger.num_blocks)
            self._ledger.try_extend(sequence.promise, whole, at_once=0)

    def hold(self, sequence: Sequence, promise: str) -> None:
        """A sequence lives on a promise from now on."""
        sequence.promise = promise
        self._holders[promise] += 1

    def release(self, sequence: Sequence) -> None:
        """A sequence needs its promise no more; the last holder gives it back. Without effect where it has none."""
        promise = sequence.promise
        if promise is None:
            return
        self._holders[promise] -= 1
        if not self._holders[promise]:
            del self._holders[promise]
            self._ledger.release(promise)
