"""A cache manager over tiny tiers with real bytes, and an account of what every byte has to be.

``CacheWorld`` offers everything that an engine does to the manager as methods that cannot be misused, so that a random
driver may call them in any order; ``check()`` compares every readable copy with what its tokens say.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from tests.fakes.clock import ManualClock
from tests.fakes.transfer import POISON, ScriptedTransfer, Words

from dflash2.cache.manager import CacheManager, CacheSettings
from dflash2.cache.rebalance import Rebalancer, Watermarks
from dflash2.cache.reservation import ReservationLedger
from dflash2.cache.sequence import Residency, Sequence
from dflash2.errors import RequestTooLarge
from dflash2.policy.adaptive import AdaptiveThreshold
from dflash2.policy.base import PlacementPolicy
from dflash2.policy.heat import HeatPolicy
from dflash2.policy.lru import LRUPolicy
from dflash2.table.keys import KeyNamespace
from dflash2.table.page_table import BlockState, PageTable
from dflash2.types import IntArray, Tier

TIERS = tuple(Tier)
GARBAGE = -0xBAD
MASK = (1 << 62) - 1
NAMESPACE = KeyNamespace(model="m", weights_version="1", dtype="float32", block_size=4)
ROOTS = (NAMESPACE.root(), NAMESPACE.root(tenant_salt="other"))
MANY_ROUNDS = 60
"""More rounds than any wait for room may take while copies end."""


def fingerprints(root: bytes, tokens: list[int]) -> Words:
    """One word per token that depends on everything up to it: what its KV "is"."""
    words, state = [], int.from_bytes(root[:7], "little")
    for token in tokens:
        state = (state * 6364136223846793005 + token * 1442695040888963407 + 1013904223) & MASK
        state ^= state >> 29
        words.append(state)
    return np.array(words, np.int64)


def ints(values: list[int]) -> IntArray:
    return np.array(values, np.int32)


@dataclass(eq=False)
class Request:
    """A sequence and what it is going to say."""

    sequence: Sequence
    script: list[int]
    reserved: int
    """Blocks."""
    words: Words = field(init=False)

    def __post_init__(self) -> None:
        self.words = fingerprints(self.sequence.root, self.script)


class CacheWorld:
    """See the module.

    Args:
        slots: HBM, DRAM and NVMe slots.
        block_size: tokens per block.
        policy: "heat" or "lru".
        headroom: slots of the whole that are never promised.
    """

    def __init__(self, slots: tuple[int, int, int], block_size: int, policy: str, headroom: int = 1) -> None:
        self.block_size = block_size
        self.clock = ManualClock()
        self.memory = {
            tier: np.full((count, block_size), POISON, np.int64) for tier, count in zip(Tier, slots, strict=True)
        }
        self.transfer = ScriptedTransfer(self.memory)
        self.table = PageTable(dict(zip(Tier, slots, strict=True)))
        settings = CacheSettings(block_size, block_size * 8, batch_blocks=3, prefetch_window=4)
        self.cache = CacheManager(self.table, make_policy(policy, slots[0]), self.transfer, settings, self._copy_in_hbm)
        self.headroom = headroom
        self.ledger = ReservationLedger(sum(slots) - (headroom if sum(slots[1:]) else 0), slots[0])
        self.rebalancer = Rebalancer(self.cache, Watermarks(0.8, 0.5), 1.0, AdaptiveThreshold(0.8))
        self.requests: list[Request] = []
        self.num_opened = 0
        self.by_key: dict[bytes, Words] = {}
        """Content of every block that was ever sealed."""

    def _copy_in_hbm(self, old: IntArray, new: IntArray) -> None:
        self.memory[Tier.HBM][new] = self.memory[Tier.HBM][old]

    @property
    def now(self) -> float:
        return self.clock()

    # -- what an engine does -------------------------------------------------------------------------------------

    def open(self, prompt: list[int], script: list[int], root: bytes = ROOTS[0]) -> Request | None:
        """``script`` follows the prompt; None if it is not to be had now."""
        name = f"r{self.num_opened}"
        every = prompt + script
        try:
            reserved = self.ledger.try_reserve(name, self._blocks(len(every)))
        except RequestTooLarge:
            return None
        if not reserved:
            return None
        self.num_opened += 1
        request = Request(self.cache.open(name, root, ints(prompt), self.now), every, self._blocks(len(every)))
        assert request.sequence.num_tokens < len(prompt)
        self.requests.append(request)
        return request

    def fork(self, request: Request, script: list[int]) -> Request | None:
        """A twin that goes on differently; None if there is no room for it or nothing to share."""
        sequence = request.sequence
        every = sequence.tokens.tolist() + script
        name = f"r{self.num_opened}"
        # A copied tail is one block more than the tokens say.
        blocks = self._blocks(len(every)) + 1
        if blocks > self.ledger.largest or not self.ledger.try_reserve(name, blocks):
            return None
        self.num_opened += 1
        twin = Request(self.cache.fork(sequence, name), every, blocks)
        self.requests.append(twin)
        return twin

    def join(self, request: Request) -> None:
        """Take over what others have published of its script since it was opened."""
        self.cache.join_prefix(request.sequence, ints(request.script), self.now)

    def try_enter(self, request: Request, growth: int) -> bool:
        if request.sequence.residency is not Residency.PAUSED:
            return False
        growth = min(growth, self.left(request))
        return self.cache.residency.try_enter(request.sequence, growth, self.now)

    def advance_entering(self, request: Request) -> bool:
        if request.sequence.residency is not Residency.ENTERING:
            return False
        return self.cache.residency.advance_entering(request.sequence, self.now)

    def write(self, request: Request, count: int, *, crash: bool = False) -> bool:
        """One step of ``count`` tokens; a crashed one leaves garbage and is not completed."""
        sequence = request.sequence
        count = min(count, self.left(request))
        if sequence.residency is not Residency.RESIDENT or not count:
            return False
        if not self.cache.residency.try_grow(sequence, count, self.now):
            return False
        first = sequence.num_tokens
        for index in range(first, first + count):
            slot = sequence.hbm_slots[index // self.block_size]
            self.memory[Tier.HBM][slot, index % self.block_size] = GARBAGE if crash else request.words[index]
        if not crash:
            self.cache.advance([(sequence, ints(request.script[first : first + count]))])
            self._note_keys(request)
        return True

    def leave(self, request: Request) -> None:
        self.cache.residency.leave(request.sequence, self.now)

    def close(self, request: Request) -> None:
        self.cache.close(request.sequence, self.now)
        self.ledger.release(request.sequence.request_id)
        self.requests.remove(request)

    def recover(self, request: Request, *, give_up_loads: bool) -> None:
        """Cut an entering sequence back to what is there."""
        sequence = request.sequence
        if sequence.residency is not Residency.ENTERING:
            return
        keep = self.cache.residency.first_lost(sequence)
        if keep is None and give_up_loads:
            absent = np.flatnonzero(~self.table.has(sequence.block_ids, Tier.HBM))
            keep = int(absent[0]) if len(absent) else None
        if keep is not None:
            self.cache.residency.leave(sequence, self.now)
            self.cache.truncate(sequence, keep)

    def rebalance(self, leaving: list[Request]) -> None:
        self.cache.mover.poll(self.now)
        resident = [one for one in leaving if one.sequence.residency is Residency.RESIDENT]
        if self.lower_slots:
            self.rebalancer.run(distinct(resident), self.now)

    def prefetch(self, upcoming: list[Request]) -> None:
        paused = [one for one in upcoming if one.sequence.residency is Residency.PAUSED]
        self.cache.prefetcher.run(distinct(paused), self.rebalancer.spare_hbm_slots(), self.clock())

    def poll(self) -> None:
        self.cache.mover.poll(self.now)

    # -- waits that must come to an end --------------------------------------------------------------------------

    def settle_enter(self, request: Request, growth: int) -> bool:
        """Pause everybody else, let it in and wait: it must become resident, whole or cut back."""
        for other in self.requests:
            if other is not request:
                self.leave(other)
        if request.sequence.residency is Residency.PAUSED and not self.try_enter(request, growth):
            raise AssertionError("a request that is alone in HBM was not let in")
        for _ in range(MANY_ROUNDS):
            if request.sequence.residency is Residency.RESIDENT or self.advance_entering(request):
                return True
            self._everything_ends()
            self.recover(request, give_up_loads=False)
            if request.sequence.residency is Residency.PAUSED:
                assert self.try_enter(request, growth)
        return self._short_of_slots("it did not become resident")

    def settle_write(self, request: Request, count: int) -> bool:
        """A resident sequence that was promised room gets it after finitely many copies."""
        sequence = request.sequence
        count = min(count, self.left(request))
        if sequence.residency is not Residency.RESIDENT or not count:
            return False
        if not self.cache.residency.try_extend(sequence, count):
            return False
        for _ in range(MANY_ROUNDS):
            if self.write(request, count):
                return True
            self._everything_ends()
        return self._short_of_slots("a promise of room was not kept")

    def _everything_ends(self) -> None:
        self.transfer.end_all()
        self.clock.advance(6.0)
        self.poll()

    def _short_of_slots(self, complaint: str) -> bool:
        """Slots lost to a failed medium may leave less than was promised; otherwise this is a fault."""
        retired = sum(self.table.tiers[tier].num_retired for tier in Tier)
        if self.ledger.num_promised + retired <= self.ledger.num_blocks:
            raise AssertionError(complaint)
        return False

    # -- what must hold ------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Raise if an account does not add up or a readable copy holds wrong bytes."""
        self.cache.check_integrity()
        self.ledger.check_integrity()
        self.transfer.check_integrity()
        table = self.table
        capacity = table.capacity(Tier.HBM)
        assert table.num_pinned + self.cache.residency.num_promised <= capacity, "HBM is promised twice"
        for request in self.requests:
            self._check_request(request)
        for block_id in np.flatnonzero(table.state == BlockState.PUBLISHED).tolist():
            key = self.cache.index.key_of(block_id)
            assert key is not None
            assert table.present[block_id] or table.arriving[block_id] or table.ref_count[block_id], "nothing to find"
            self._check_block(block_id, self.by_key[key])
            self._check_predecessor(block_id)

    def _check_request(self, request: Request) -> None:
        sequence = request.sequence
        count = sequence.num_tokens
        assert sequence.tokens.tolist() == request.script[:count]
        assert len(sequence.keys) == count // self.block_size
        for index in range(self._blocks(count)):
            words = request.words[index * self.block_size : min((index + 1) * self.block_size, count)]
            self._check_block(int(sequence.block_ids[index]), words)
        if sequence.residency is Residency.RESIDENT:
            there = self.memory[Tier.HBM][sequence.hbm_slots].reshape(-1)[:count]
            assert np.array_equal(there, request.words[:count]), "a resident sequence reads wrong KV"

    def _check_block(self, block_id: int, words: Words) -> None:
        """Every copy that may be read holds these words. Copies of a block in flight are judged when that has ended."""
        table = self.table
        present = int(table.present[block_id])
        judged = (Tier.HBM,) if table.busy[block_id] else TIERS
        for tier in judged:
            if not present & 1 << tier.value:
                continue
            there = self.memory[tier][table.slot[block_id, tier.value], : len(words)]
            assert np.array_equal(there, words), f"block {block_id} holds wrong bytes on {tier.label}"

    def _check_predecessor(self, block_id: int) -> None:
        table = self.table
        if table.position[block_id] > 0:
            assert table.state[table.parent[block_id]] == BlockState.PUBLISHED, "a visible prefix has a hole"

    def check_all_given_back(self) -> None:
        """After everybody has left: counters are back and, once the cache is forgotten, every slot is free."""
        for request in list(self.requests):
            self.close(request)
        self._everything_ends()
        self.check()
        table = self.table
        assert not table.ref_count.any() and not table.pin_count.any() and not table.busy.any()
        assert self.cache.residency.num_promised == 0 and self.ledger.num_promised == 0
        assert self.cache.mover.num_in_flight == 0 and table.num_pinned == 0
        assert all(self.cache.mover.leaving(tier) == 0 for tier in Tier)
        self.prefetch([])
        assert self.cache.prefetcher.num_outstanding == 0
        self.cache.forget_all()
        self.check()
        assert len(table.live()) == 0
        for tier in Tier:
            assert table.num_used(tier) == 0

    # -- helpers -------------------------------------------------------------------------------------------------

    @property
    def lower_slots(self) -> int:
        return self.table.capacity(Tier.DRAM) + self.table.capacity(Tier.NVME)

    def left(self, request: Request) -> int:
        """Tokens of its script that are not written yet."""
        return len(request.script) - request.sequence.num_tokens

    def _blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def _note_keys(self, request: Request) -> None:
        for position, key in enumerate(request.sequence.keys):
            words = request.words[position * self.block_size : (position + 1) * self.block_size]
            known = self.by_key.setdefault(key, words)
            assert np.array_equal(known, words), "two contents have one key"


def make_policy(name: str, num_hbm_slots: int) -> PlacementPolicy:
    return LRUPolicy(num_hbm_slots) if name == "lru" else HeatPolicy(num_hbm_slots, 0.8)


def distinct(requests: list[Request]) -> IntArray:
    """Their blocks in order, each once."""
    seen = dict.fromkeys(int(block_id) for request in requests for block_id in request.sequence.block_ids)
    return ints(list(seen))
