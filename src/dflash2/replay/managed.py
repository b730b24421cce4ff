"""What a server would have done: the real table, manager, policy and prefetcher, over pools without bytes."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from dflash2.build import make_policy
from dflash2.cache.arrivals import Arrivals
from dflash2.cache.manager import CacheManager, CacheSettings
from dflash2.cache.rebalance import Rebalancer, Watermarks
from dflash2.cache.sequence import Sequence
from dflash2.config import Config
from dflash2.errors import IntegrityError
from dflash2.policy.adaptive import AdaptiveThreshold
from dflash2.policy.rebuild import RebuildCost
from dflash2.pools.base import BlockPool
from dflash2.pools.null import NullPool
from dflash2.replay.calibration import HeatSampler
from dflash2.replay.device import DeviceModel
from dflash2.replay.events import Arrival, Finish
from dflash2.replay.sizes import Slots, is_single
from dflash2.table.page_table import TIER_BIT, PageTable
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


@dataclass(frozen=True, slots=True)
class _Waiting:
    arrival: Arrival
    keys: list[bytes]
    on_nvme: npt.NDArray[np.intp]
    """Places in ``keys`` of the blocks that were on NVMe only."""


class ManagedCache:
    """Serves requests: what is found, what is copied, what has to go.

    With a single tier the table has room to spare for the arriving request, which then gives back what is above the
    capacity: by the policy's order over all blocks, its own included. So a block may also be passed over.

    Args:
        config: policy and sizes of batches.
        slots: blocks of each tier.
        block: size of a block.
        names: keys of blocks.
        device: how long requests wait, and how much is read from NVMe meanwhile.
    """

    def __init__(self, config: Config, slots: Slots, block: BlockSize, names: BlockNames, device: DeviceModel) -> None:
        self._now = 0.0
        self._names = names
        self._device = device
        self._block_bytes = block.num_bytes
        self._single = is_single(slots)
        self._spare = SPARE_TOKENS // block.tokens if self._single else 0
        sizes = {tier: slots.get(tier, 0) for tier in Tier}
        sizes[Tier.HBM] += self._spare
        layout = KVLayout(1, 1, block.num_bytes // 2, 1, "uint8")
        pools: dict[Tier, BlockPool] = {tier: NullPool(tier, size, layout) for tier, size in sizes.items()}
        transfer = InlineTransferEngine(pools, lambda: self._now)
        self.table = PageTable(sizes)
        policy = config.policy
        rebuild = RebuildCost(device.prefill_doubles_at / block.tokens)
        self.policy = make_policy(config, slots[Tier.HBM], rebuild)
        settings = CacheSettings(1, block.num_bytes, policy.swap_batch_size, config.kv_block.prefetch_window)
        self.cache = CacheManager(self.table, self.policy, transfer, settings, _never, names.chain)
        marks = Watermarks(policy.high_watermark, policy.low_watermark)
        guard = AdaptiveThreshold(policy.cold_threshold) if policy.adaptive else None
        self._rebalancer = Rebalancer(self.cache, marks, policy.refresh_interval_s, guard)
        self._arrivals = Arrivals(self.table, self.cache.index)
        self._waiting: deque[_Waiting] = deque()
        self._reading_s = 0.0
        """Time in which NVMe can read and has not; below zero while it is behind."""
        self.num_awaited = 0
        """Blocks that were on NVMe only when their request arrived."""
        self.num_brought_near = 0
        """Of these, in DRAM or HBM when it was admitted."""
        self._open: dict[int, Sequence] = {}
        self._number_of = np.zeros(self.table.num_rows, np.int32)
        """Number of the block in each row, for the sampler."""
        self.sampler = HeatSampler()

    def arrive(self, arrival: Arrival) -> dict[Tier, int]:
        """A request arrives. On a single tier it is served at once, else after ``device.admission_s``.

        Returns:
            Leading blocks that are there, by the fastest tier that has them; nothing for a request that is larger than
            HBM, which a server refuses.
        """
        now = arrival.at_s
        self._admit_until(now)
        self._work_ahead(now)
        self.sampler.note_use(arrival.blocks, now)
        keys = self._names.chain(b"", arrival.blocks, 1)
        ids = self.cache.index.longest_prefix(keys)
        fits = len(arrival.blocks) <= self.table.capacity(Tier.HBM)
        hits = self._by_tier(ids) if fits else dict.fromkeys(Tier, 0)
        if self._single:
            self._serve(arrival, now)
        elif fits:
            self._arrivals.note(str(arrival.number), keys, now)
            on_nvme = np.flatnonzero(self.table.present[ids] == TIER_BIT[Tier.NVME])
            self._waiting.append(_Waiting(arrival, keys, on_nvme))
        if self.sampler.is_due(arrival.number):
            self.policy.refresh(self.table, now)
            self._sample(now)
        return hits

    def finish(self, finish: Finish) -> None:
        """A request has ended; how it did is told to the policy."""
        self._admit_until(finish.at_s)
        while any(one.arrival.number == finish.number for one in self._waiting):
            self._admit_next(finish.at_s)
        self._work_ahead(finish.at_s)
        sequence = self._open.pop(finish.number, None)
        if sequence is not None:
            self.cache.close(sequence, finish.at_s, finish.outcome)

    def drain(self) -> None:
        """Serve whoever still waits: the trace is over."""
        self._admit_until(np.inf)

    def check_integrity(self) -> None:
        """Raise IntegrityError if table, index and sequences disagree."""
        self.cache.check_integrity()

    def _admit_until(self, now: float) -> None:
        while self._waiting and self._waiting[0].arrival.at_s + self._device.admission_s <= now:
            self._admit_next(self._waiting[0].arrival.at_s + self._device.admission_s)

    def _admit_next(self, now: float) -> None:
        self._work_ahead(now)
        one = self._waiting.popleft()
        ids = self.cache.index.longest_prefix(one.keys)
        ids = ids[one.on_nvme[one.on_nvme < len(ids)]]
        nearer = self.table.has(ids, Tier.HBM) | self.table.has(ids, Tier.DRAM)
        self.num_awaited += len(one.on_nvme)
        self.num_brought_near += int(np.count_nonzero(nearer))
        self._arrivals.forget(str(one.arrival.number))
        self._serve(one.arrival, now)
        self._run_rounds(now)

    def _serve(self, arrival: Arrival, now: float) -> None:
        """All that a request does in HBM, in one instant; its blocks are cache from then on."""
        tokens = np.append(arrival.blocks, np.int32(0))  # one token is left to compute
        sequence = self.cache.open(str(arrival.number), b"", tokens, now, arrival.traits)
        new = arrival.blocks[len(sequence.block_ids) :]
        if not self.cache.residency.try_enter(sequence, len(new), now):
            self.cache.close(sequence, now)  # larger than the whole
            return
        self._compute(sequence, new, now)
        self.cache.residency.leave(sequence, now)
        self.cache.truncate(sequence, 0)  # it is closed when it has ended
        self._open[arrival.number] = sequence
        if self._single:
            self.cache.room.make(Tier.HBM, self._spare, now)

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
        if self._single:
            self._now = now
            return
        step = max(self._rebalancer.refresh_interval_s, (now - self._now) / TICKS)
        while self._now < now:
            seconds = min(step, now - self._now)
            self._now += seconds
            if self._waiting:
                self._prefetch(seconds)
            if self._now < now:
                self._run_rounds(self._now)
        self._now = now

    def _prefetch(self, seconds: float) -> None:
        """Bring nearer what waiting requests will use, as much as NVMe can read in that time."""
        counters = self.cache.counters
        block_s = self._block_bytes / self._device.nvme_read
        self._reading_s = min(0.0, self._reading_s) + seconds
        while self._reading_s > 0:
            issued, loaded = counters.prefetch_issued_blocks, counters.loaded_from_nvme_blocks
            self.cache.prefetcher.run(self._arrivals.upcoming(), self._rebalancer.spare_hbm_slots(), self._now)
            self.cache.mover.poll(self._now)
            self._reading_s -= (counters.loaded_from_nvme_blocks - loaded) * block_s
            if counters.prefetch_issued_blocks == issued:
                return

    def _run_rounds(self, now: float) -> None:
        """Rebalance until there is nothing more to do."""
        cache = self.cache
        for _ in range(MAX_ROUNDS):
            self._rebalancer.run(EMPTY, now)
            if not self._waiting:
                cache.prefetcher.run(EMPTY, self._rebalancer.spare_hbm_slots(), now)
            if not cache.mover.num_in_flight:
                return
            cache.mover.poll(now)
        raise IntegrityError("moving blocks ahead of need does not come to an end")

    def _sample(self, now: float) -> None:
        live = self.table.live()
        self.sampler.take(self._number_of[live], self.table.heat[live], now, self.policy.horizon_s(now))


def _never(old: IntArray, new: IntArray) -> None:
    raise IntegrityError("no sequence of a replay is forked")
