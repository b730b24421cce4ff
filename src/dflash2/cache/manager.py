"""The cache manager: sequences, their blocks, and what is in HBM when a step needs it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from dflash2.cache.integrity import check_sequences
from dflash2.cache.mover import Mover
from dflash2.cache.prefetcher import Prefetcher
from dflash2.cache.regret import RegretWatch
from dflash2.cache.residency import BlockCopier, ResidencyManager
from dflash2.cache.room import Room
from dflash2.cache.sequence import Residency, Sequence
from dflash2.errors import IntegrityError
from dflash2.monitoring.computed_keys import ComputedKeys
from dflash2.monitoring.counters import CacheCounters
from dflash2.policy.base import Outcome, PlacementPolicy, RequestTraits
from dflash2.table.keys import KeyChain, chain
from dflash2.table.page_table import BlockState, PageTable
from dflash2.table.prefix_index import PrefixIndex
from dflash2.transfer.base import TransferEngine
from dflash2.types import ByteArray, IntArray, Tier


@dataclass(frozen=True, slots=True)
class CacheSettings:
    """Sizes that the cache manager works with."""

    block_size: int
    """Tokens per block."""
    block_bytes: int
    """Payload of one block."""
    batch_blocks: int
    """``policy.swap_batch_size``."""
    prefetch_window: int
    """``kv_block.prefetch_window``."""


class CacheManager:
    """Owner of the page table; every method runs on one thread and none of them waits.

    A sequence is opened (its cached prefix is found), enters (it is pinned and its blocks come to HBM), takes part in
    steps (``try_grow`` before, ``advance`` after), leaves when others need the room, and is closed.

    Args:
        table: page table with the slots of all tiers.
        policy: judges blocks.
        transfer: moves bytes between tiers.
        settings: sizes.
        copy_in_hbm: for copy-on-write of a forked tail.
        key_chain: names blocks; another one than the hash of the content is for replays of traces, which have no
            content.
    """

    def __init__(
        self,
        table: PageTable,
        policy: PlacementPolicy,
        transfer: TransferEngine,
        settings: CacheSettings,
        copy_in_hbm: BlockCopier,
        key_chain: KeyChain = chain,
    ) -> None:
        self.table = table
        self.policy = policy
        self.block_size = settings.block_size
        self.counters = CacheCounters()
        self.index = PrefixIndex(table)
        self.mover = Mover(
            table, self.index, transfer, self.counters, settings.block_bytes, settings.batch_blocks, self._reap
        )
        self.room = Room(table, self.index, policy, self.mover, self.counters)
        self.prefetcher = Prefetcher(table, self.mover, self.room, self.counters, settings.prefetch_window)
        self.regret = RegretWatch(table)
        self.residency = ResidencyManager(
            table,
            policy,
            self.room,
            self.mover,
            self.prefetcher,
            self.regret,
            self.counters,
            block_size=settings.block_size,
            copy_in_hbm=copy_in_hbm,
        )
        self._key_chain = key_chain
        self._computed = ComputedKeys()
        self._open: set[Sequence] = set()
        self._dropped: set[str] = set()
        """Requests that have not ended and have no sequence for now."""

    # -- open and close ------------------------------------------------------------------------------------------

    def peek(self, root: bytes, token_ids: IntArray) -> IntArray:
        """Ids of the cached prefix blocks of a prompt, without any effect on statistics."""
        return self.index.longest_prefix(self.reusable_keys(root, token_ids))

    def open(
        self, request_id: str, root: bytes, token_ids: IntArray, now: float, traits: RequestTraits | None = None
    ) -> Sequence:
        """Start a sequence with the longest cached prefix of its prompt (at least one token is left to compute).

        Args:
            request_id: unique among the open ones; one that was dropped goes on.
            root: ``KeyNamespace.root(...)``.
            token_ids: int32 ``[n]``, the prompt.
            now: seconds.
            traits: what else is known of the request; told to the policy.
        """
        keys = self.reusable_keys(root, token_ids)
        if request_id in self._dropped:
            self._dropped.remove(request_id)
        else:
            self.policy.on_arrival(request_id, traits or RequestTraits(num_prompt_tokens=len(token_ids)), keys, now)
        ids = self.index.longest_prefix(keys)
        num_cached = len(ids) * self.block_size
        sequence = Sequence(request_id, root, ids, keys=keys[: len(ids)], num_cached_tokens=num_cached)
        sequence.append_tokens(token_ids[:num_cached])
        self.table.ref_count[ids] += 1
        self._open.add(sequence)
        self.counters.looked_up_tokens += len(token_ids)
        self._count_hits(ids)
        return sequence

    def next_block_key(self, sequence: Sequence, token_ids: IntArray) -> bytes | None:
        """Key of the next block of a prompt that stands at a block border; None elsewhere and for its last tokens.

        Args:
            sequence: its tokens are the first of ``token_ids``.
            token_ids: int32 ``[n]``, the prompt; at least one token is left to compute behind the block.
        """
        start, end = sequence.num_tokens, sequence.num_tokens + self.block_size
        if start != len(sequence.block_ids) * self.block_size or end >= len(token_ids):
            return None
        return self._key_chain(sequence.last_key, token_ids[start:end], self.block_size)[0]

    def join_prefix(self, sequence: Sequence, token_ids: IntArray, now: float) -> None:
        """Take over blocks of a prompt that other sequences have published since this one was opened.

        A pinned sequence may be ENTERING again afterwards. Arguments as for ``next_block_key``.
        """
        while (key := self.next_block_key(sequence, token_ids)) is not None:
            block_id = self.index.get(key)
            if block_id is None or not self.table.present[block_id]:
                return
            ids = np.array([block_id], np.int32)
            self.table.ref_count[ids] += 1  # before it is attached: loading it may have to forget what nobody holds
            if not self.residency.try_attach(sequence, ids, now):
                self.table.ref_count[ids] -= 1
                return
            start = sequence.num_tokens
            sequence.append_tokens(token_ids[start : start + self.block_size])
            sequence.keys.append(key)
            sequence.num_cached_tokens += self.block_size
            self.counters.joined_tokens += self.block_size

    def fork(self, sequence: Sequence, request_id: str) -> Sequence:
        """A second sequence with the same past. Its blocks are shared; an OPEN tail is copied by the first to write."""
        ids = sequence.block_ids[: self.residency.blocks_for(sequence.num_tokens)].copy()
        twin = Sequence(request_id, sequence.root, ids, keys=list(sequence.keys))
        twin.append_tokens(sequence.tokens)
        sequence.writable_tokens = 0  # its tail is shared from now on
        self.table.ref_count[twin.block_ids] += 1
        self._open.add(twin)
        return twin

    def close(self, sequence: Sequence, now: float, outcome: Outcome | None = None) -> None:
        """End a sequence in whatever state it is. Published blocks stay as cache. Idempotent.

        Args:
            sequence: any.
            now: seconds.
            outcome: how the request ended, where the engine knows; told to the policy.
        """
        if not sequence.closed:
            self.residency.leave(sequence, now)
            self.policy.on_finish(sequence.request_id, outcome, now)
            self._give_up(sequence)

    def drop(self, sequence: Sequence, now: float) -> None:
        """Give up the blocks of an open sequence whose request goes on: to the policy it has not ended.

        It is opened again under the same id, or ``end_dropped``.
        """
        self._dropped.add(sequence.request_id)
        self.residency.leave(sequence, now)
        self._give_up(sequence)

    def end_dropped(self, request_id: str, now: float, outcome: Outcome | None = None) -> None:
        """A request ends that was dropped and not opened again; without effect on others."""
        if request_id in self._dropped:
            self._dropped.remove(request_id)
            self.policy.on_finish(request_id, outcome, now)

    def truncate(self, sequence: Sequence, num_blocks: int) -> None:
        """Give up all blocks of a paused sequence from ``num_blocks`` on; their tokens must be computed again."""
        if sequence.residency is not Residency.PAUSED:
            raise IntegrityError("only a paused sequence can be truncated")
        self._release_from(sequence, num_blocks)

    def advance(self, work: Iterable[tuple[Sequence, IntArray]]) -> None:
        """The KV of these tokens (int32 ``[n]``) has been written behind those before; publish what became full."""
        block_size, num_tokens, num_read = self.block_size, 0, 0
        for sequence, token_ids in work:
            num_read += -(-sequence.num_tokens // block_size)
            num_tokens += sequence.append_tokens(token_ids)
            if sequence.num_tokens >= (len(sequence.keys) + 1) * block_size:
                self._seal_from(sequence, len(sequence.keys))
        self.counters.computed_tokens += num_tokens
        self.counters.used_blocks += num_read  # the step has read them, so they were in HBM
        self.counters.used_in_hbm_blocks += num_read

    # -- restart and flush ---------------------------------------------------------------------------------------

    def adopt(self, slots: IntArray, keys: ByteArray) -> None:
        """Make blocks findable that an earlier run left on NVMe; each is verified when it is first loaded.

        Args:
            slots: int32 ``[n]``, distinct, free.
            keys: uint8 ``[n, KEY_BYTES]``, distinct.
        """
        self.table.tiers[Tier.NVME].claim(slots)
        ids = self.table.try_allocate(len(slots))
        assert ids is not None  # there is a row for every slot
        self.table.place(ids, Tier.NVME, slots)
        self.table.settle(ids, Tier.NVME)
        for block_id, key in zip(ids.tolist(), keys, strict=True):
            self.index.adopt(block_id, key.tobytes())

    def forget_all(self) -> None:
        """Make everything cached unfindable; blocks of open sequences stay with them, the others are freed."""
        published = np.flatnonzero(self.table.state == BlockState.PUBLISHED).astype(np.int32)
        self.index.clear()
        self._reap(published)

    # -- integrity -----------------------------------------------------------------------------------------------

    def check_integrity(self) -> None:
        """Raise IntegrityError if table, index, sequences and promises do not agree."""
        self.table.check_integrity()
        self.index.check_integrity()
        check_sequences(self.table, self._open, self.block_size)
        if self.residency.num_promised != sum(sequence.growth_blocks for sequence in self._open):
            raise IntegrityError("promised growth does not add up")

    # -- inside --------------------------------------------------------------------------------------------------

    def reusable_keys(self, root: bytes, token_ids: IntArray) -> list[bytes]:
        """Keys of the full blocks of a prompt that may be taken over: at least one token is left to compute."""
        return self._key_chain(root, token_ids[: len(token_ids) - 1], self.block_size)

    def _count_hits(self, ids: IntArray) -> None:
        """Credit each block to the fastest tier that has it."""
        for tier, there in self.table.by_fastest_tier(ids).items():
            self.counters.hit_tokens[tier] += len(there) * self.block_size

    def _seal_from(self, sequence: Sequence, first: int) -> None:
        """Blocks from index ``first`` on have become full."""
        parent_key = sequence.last_key
        keys = self._key_chain(parent_key, sequence.tokens[first * self.block_size :], self.block_size)
        sequence.keys += keys
        ids = sequence.block_ids[first : first + len(keys)]
        self.table.state[ids[self.table.state[ids] == BlockState.OPEN]] = BlockState.SEALED
        self.counters.recomputed_tokens += self.block_size * sum(map(self._computed.note, keys))
        self.counters.published_blocks += self.index.publish_chain(ids, keys, parent_key, first)

    def _give_up(self, sequence: Sequence) -> None:
        self._release_from(sequence, 0)
        self._open.discard(sequence)
        sequence.closed = True

    def _release_from(self, sequence: Sequence, num_blocks: int) -> None:
        gone = sequence.block_ids[num_blocks:].copy()
        sequence.block_ids = sequence.block_ids[:num_blocks].copy()
        sequence.hbm_slots = sequence.hbm_slots[:0]
        sequence.keep_tokens(num_blocks * self.block_size)
        del sequence.keys[num_blocks:]
        self.table.ref_count[gone] -= 1
        self.table.next_use[gone] = np.inf  # the queue expected this sequence, not its blocks
        self._reap(gone)

    def _reap(self, ids: IntArray) -> None:
        self.room.release(ids)
