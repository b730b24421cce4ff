"""What a server would have done: the real table, manager, policy and prefetcher, over pools without bytes."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from dflash2.build import make_policy
from dflash2.cache.manager import CacheManager, CacheSettings
from dflash2.cache.rebalance import Rebalancer, Watermarks
from dflash2.cache.sequence import Sequence
from dflash2.config import Config
from dflash2.errors import IntegrityError
from dflash2.policy.adaptive import AdaptiveThreshold
from dflash2.pools.base import BlockPool
from dflash2.pools.null import NullPool
from dflash2.replay.calibration import HeatSampler
from dflash2.replay.events import Arrival, Finish
from dflash2.replay.sizes import Slots, is_single
from dflash2.table.page_table import PageTable
from dflash2.transfer.inline import InlineTransferEngine
from dflash2.types import KEY_BYTES, IntArray, KVLayout, Tier

SPARE_TOKENS = 1 << 21
"""Room beside the capacity of a single tier: an arriving request takes it, and then competes for a place."""
MAX_ROUNDS = 100_000
"""Rounds of copying after which a request that is still not in HBM will never be."""
TICKS = 8
"""Rounds of work ahead of need between two events, at most."""
EMPTY: IntArray = np.empty(0, np.int32)


@dataclass(frozen=True, slots=True)
class BlockSize:
    """Of one block of a trace."""

    tokens: int
    num_bytes: int


class BlockNames:
    """Keys of blocks that have numbers in place of content. A token stands for a whole block here."""

    def __init__(self) -> None:
        self._names: list[bytes] = []

    def chain(self, parent: bytes, tokens: IntArray, block_size: int) -> list[bytes]:
        """See ``table.keys.KeyChain``; ``block_size`` is 1."""
        names = self._names
        for number in range(len(names), int(tokens.max(initial=-1)) + 1):
            names.append(number.to_bytes(KEY_BYTES, "little"))
        return [names[number] for number in tokens.tolist()]


class ManagedCache:
    """Serves each request at the moment it arrives: what is found, what is copied, what has to go.

    With a single tier the table has room to spare for the arriving request, which then gives back what is above the
    capacity: by the policy's order over all blocks, its own included. So a block may also be passed over.

    Args:
        config: policy and sizes of batches.
        slots: blocks of each tier.
        block: size of a block.
        names: keys of blocks.
    """

    def __init__(self, config: Config, slots: Slots, block: BlockSize, names: BlockNames) -> None:
        self._now = 0.0
        self._single = is_single(slots)
        self._spare = SPARE_TOKENS // block.tokens if self._single else 0
        sizes = {tier: slots.get(tier, 0) for tier in Tier}
        sizes[Tier.HBM] += self._spare
        layout = KVLayout(1, 1, block.num_bytes // 2, 1, "uint8")
        pools: dict[Tier, BlockPool] = {tier: NullPool(tier, size, layout) for tier, size in sizes.items()}
        transfer = InlineTransferEngine(pools, lambda: self._now)
        self.table = PageTable(sizes)
        policy = config.policy
        self.policy = make_policy(config, slots[Tier.HBM])
        settings = CacheSettings(1, block.num_bytes, policy.swap_batch_size, config.kv_block.prefetch_window)
        self.cache = CacheManager(self.table, self.policy, transfer, settings, _never, names.chain)
        marks = Watermarks(policy.high_watermark, policy.low_watermark)
        guard = AdaptiveThreshold(policy.cold_threshold) if policy.adaptive else None
        self._rebalancer = Rebalancer(self.cache, marks, policy.refresh_interval_s, guard)
        self._open: dict[int, Sequence] = {}
        self._number_of = np.zeros(self.table.num_rows, np.int32)
        """Number of the block in each row, for the sampler."""
        self.sampler = HeatSampler()

    def arrive(self, arrival: Arrival) -> dict[Tier, int]:
        """Serve a request.

        Returns:
            Leading blocks that were there, by the fastest tier that had them; nothing for a request that is larger
            than HBM, which a server refuses.
        """
        now = arrival.at_s
        self._work_ahead(now)
        self.sampler.note_use(arrival.blocks, now)
        tokens = np.append(arrival.blocks, np.int32(0))  # one token is left to compute
        sequence = self.cache.open(str(arrival.number), b"", tokens, now, arrival.traits)
        hits = self._by_tier(sequence.block_ids)
        new = arrival.blocks[len(sequence.block_ids) :]
        if not self.cache.residency.try_enter(sequence, len(new), now):
            self.cache.close(sequence, now)
            return dict.fromkeys(Tier, 0)
        self._compute(sequence, new, now)
        self.cache.residency.leave(sequence, now)
        self.cache.truncate(sequence, 0)  # its blocks are cache from now on; it is closed when it has ended
        self._open[arrival.number] = sequence
        if self._single:
            self.cache.room.make(Tier.HBM, self._spare, now)
        else:
            self._run_rounds(now)
        if self.sampler.is_due(arrival.number):
            self.policy.refresh(self.table, now)
            self._sample(now)
        return hits

    def finish(self, finish: Finish) -> None:
        """A request has ended; how it did is told to the policy."""
        self._work_ahead(finish.at_s)
        sequence = self._open.pop(finish.number, None)
        if sequence is not None:
            self.cache.close(sequence, finish.at_s, finish.outcome)

    def check_integrity(self) -> None:
        """Raise IntegrityError if table, index and sequences disagree."""
        self.cache.check_integrity()

    def _compute(self, sequence: Sequence, new: IntArray, now: float) -> None:
        residency, mover = self.cache.residency, self.cache.mover
        for _ in range(MAX_ROUNDS):
            if residency.advance_entering(sequence, now):
                break
            mover.poll(now)
        else:
            raise IntegrityError(f"request {sequence.request_id} did not come to HBM")
        if not len(new):
            return
        for _ in range(MAX_ROUNDS):
            if residency.try_grow(sequence, len(new), now):
                break
            mover.poll(now)
        else:
            raise IntegrityError(f"request {sequence.request_id} got no room in HBM")
        self._number_of[sequence.block_ids[-len(new) :]] = new
        self.cache.advance([(sequence, new)])

    def _by_tier(self, ids: IntArray) -> dict[Tier, int]:
        hits = {}
        for tier in Tier:
            there = self.table.has(ids, tier)
            hits[tier] = int(np.count_nonzero(there))
            ids = ids[~there]
        return hits

    def _work_ahead(self, now: float) -> None:
        """What a server does between its steps, while nothing happens here."""
        if not self._single:
            step = max(self._rebalancer.refresh_interval_s, (now - self._now) / TICKS)
            while self._now + step < now:
                self._now += step
                self._run_rounds(self._now)
        self._now = now

    def _run_rounds(self, now: float) -> None:
        """Rebalance until there is nothing more to do."""
        cache = self.cache
        for _ in range(MAX_ROUNDS):
            self._rebalancer.run(EMPTY, now)
            cache.prefetcher.run(EMPTY, self._rebalancer.spare_hbm_slots())
            if not cache.mover.num_in_flight:
                return
            cache.mover.poll(now)
        raise IntegrityError("moving blocks ahead of need does not come to an end")

    def _sample(self, now: float) -> None:
        live = self.table.live()
        self.sampler.take(self._number_of[live], self.table.heat[live], now, self.policy.horizon_s(now))


def _never(old: IntArray, new: IntArray) -> None:
    raise IntegrityError("no sequence of a replay is forked")
