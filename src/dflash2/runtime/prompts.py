"""Prompts before they are opened: what is cached of them, and what is brought nearer while they wait."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from dflash2.cache.arrivals import Arrivals
from dflash2.cache.manager import CacheManager
from dflash2.cache.sequence import Sequence
from dflash2.table.keys import KeyNamespace
from dflash2.types import IntArray, Tier


class Prompts:
    """Looks prompts up without effect on statistics, and knows which of them wait.

    ``adapter`` and ``tenant_salt`` are everywhere as for ``Runtime.open``.

    Args:
        cache: where they are looked up.
        namespace: what KV depends on besides the tokens.
        clock: seconds.
    """

    def __init__(self, cache: CacheManager, namespace: KeyNamespace, clock: Callable[[], float]) -> None:
        self.arrivals = Arrivals(cache.table, cache.index)
        self._cache = cache
        self._namespace = namespace
        self._clock = clock

    def root(self, adapter: str | None, tenant_salt: str | None) -> bytes:
        """The key before the first block's."""
        return self._namespace.root(adapter, tenant_salt)

    def replace_weights(self, weights_version: str) -> None:
        """Nothing that other weights computed is found from now on."""
        self._namespace = replace(self._namespace, weights_version=weights_version)

    def num_held_blocks(self, token_ids: IntArray, adapter: str | None = None, tenant_salt: str | None = None) -> int:
        """Cached blocks of a prompt that open sequences have, so that it would need no further room for them."""
        cached = self._cache.peek(self.root(adapter, tenant_salt), token_ids)
        return int(np.count_nonzero(self._cache.table.ref_count[cached]))

    def cached_tokens(
        self, token_ids: IntArray, *, adapter: str | None = None, tenant_salt: str | None = None
    ) -> dict[Tier, int]:
        """How many of a prompt's tokens are cached, each counted on the fastest tier that has it."""
        ids = self._cache.peek(self.root(adapter, tenant_salt), token_ids)
        found = self._cache.table.by_fastest_tier(ids)
        return {tier: len(there) * self._cache.block_size for tier, there in found.items()}

    def has_room_for(self, token_ids: IntArray, *, adapter: str | None = None, tenant_salt: str | None = None) -> bool:
        """Whether a prompt, opened without a promise, could enter HBM now."""
        cached = self._cache.peek(self.root(adapter, tenant_salt), token_ids)
        residency = self._cache.residency
        return residency.fits(cached, residency.blocks_for(len(token_ids)) - len(cached))

    def arrive(
        self, request_id: str, token_ids: IntArray, adapter: str | None = None, tenant_salt: str | None = None
    ) -> int:
        """A request has begun to wait for its reservation: what is cached of its prompt is brought nearer meanwhile.

        Returns:
            Prompt tokens that are cached.
        """
        keys = self._cache.reusable_keys(self.root(adapter, tenant_salt), token_ids)
        return self.arrivals.note(request_id, keys, self._clock()) * self._cache.block_size

    def forget_arrival(self, request_id: str) -> None:
        """It waits no longer. Idempotent."""
        self.arrivals.forget(request_id)

    def next_uses(self, upcoming: list[Sequence]) -> IntArray:
        """Blocks in the order in which they will be needed: of paused sequences, then of requests that wait."""
        paused = distinct_blocks(upcoming)
        if not len(self.arrivals):
            return paused
        waiting = self.arrivals.upcoming()
        return np.concatenate([paused, waiting[~np.isin(waiting, paused)]])


def distinct_blocks(sequences: list[Sequence]) -> IntArray:
    """The blocks of several sequences, each once, in their order: int32 ``[n]``."""
    if not sequences:
        return np.empty(0, np.int32)
    every = np.concatenate([sequence.block_ids for sequence in sequences])
    _, first = np.unique(every, return_index=True)
    return every[np.sort(first)]
