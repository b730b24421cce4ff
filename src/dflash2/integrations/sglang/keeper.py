"""What lies below the device pages of an engine that gives them out itself: mirror, copies down, loads back.

One thread, the scheduler's, calls everything here; nothing waits unless its name says so. The engine tells which pages
hold a block (``announce``) and which were given to somebody else (``freed``); the page table mirrors both, so a block
that is in HBM, in DRAM and on NVMe has one row.
"""

from __future__ import annotations

import time

import numpy as np

from dflash2.integrations.sglang.clock import TurnoverClock
from dflash2.integrations.sglang.copy_down import CopyDown, Ready
from dflash2.integrations.sglang.expectations import Expectations
from dflash2.integrations.sglang.holds import Holds
from dflash2.monitoring.computed_keys import ComputedKeys
from dflash2.policy.base import Outcome, RequestTraits
from dflash2.runtime import POLL_S, Runtime
from dflash2.table.page_table import TIER_BIT, BlockState
from dflash2.table.slots import ForeignSlots
from dflash2.transfer.base import LayerWatcher
from dflash2.types import IntArray, Tier

EMPTY: IntArray = np.empty(0, np.int32)


class Keeper:
    """Keeps what the engine computes for longer than its device pool can.

    Args:
        runtime: made with ``engine_pool``; its clock must be ``clock``.
        clock: advanced here, by what is announced.
        margin_blocks: free device pages below which copying down begins: what one step may take before the next
            chance comes.
    """

    def __init__(self, runtime: Runtime, clock: TurnoverClock, margin_blocks: int) -> None:
        self.runtime = runtime
        self._clock = clock
        self._cache = runtime.cache
        self._table = runtime.cache.table
        mirror = self._table.tiers[Tier.HBM]
        if not isinstance(mirror, ForeignSlots):
            raise ValueError("the runtime must have been made with engine_pool")
        self._mirror = mirror
        self._owner = np.zeros(mirror.num_slots, np.int32)
        """Block of each device page; means something only where the mirror holds one."""
        self._doomed = EMPTY
        """Blocks that were given up while they were copied from HBM: what arrives is worthless."""
        self._holds = Holds(self._table)
        self.waiting = Expectations(self._cache, clock, self._holds)
        self._computed = ComputedKeys()
        self._copy_down = CopyDown(self._cache, clock, margin_blocks)

    # -- told by the engine --------------------------------------------------------------------------------------

    def announce(
        self, request_id: str | None, keys: list[bytes], parent: bytes | None, position: int, pages: IntArray
    ) -> IntArray:
        """Blocks were computed, or loaded, and stand in the engine's tree.

        Args:
            request_id: whose they are, where that is known.
            keys: of consecutive blocks of one sequence.
            parent: key of the block before the first; None at the head of a sequence.
            position: index of the first in its sequence.
            pages: int32 ``[n]``, device page of each.

        Returns:
            Their ids; shorter than ``keys`` if the table is full.
        """
        self.freed(pages)  # whatever was noted about these pages is old
        self._clock.advance(len(pages))  # known or not: which is not the same on all ranks
        known = [self._cache.index.get(key) for key in keys]
        new = np.array([block_id is None for block_id in known], np.bool_)
        rows = self._table.try_allocate(int(new.sum()))
        if rows is None:
            return EMPTY
        ids = np.empty(len(keys), np.int32)
        ids[~new] = [block_id for block_id in known if block_id is not None]
        ids[new] = rows
        now = self._clock()
        self._table.state[rows] = BlockState.SEALED
        self._cache.policy.on_allocate(self._table, rows, now, request_id)
        self._move_in(ids, pages)
        for index in np.flatnonzero(new).tolist():
            before = parent if index == 0 else keys[index - 1]
            self._publish(int(ids[index]), keys[index], before, position + index)
        again = sum(self._computed.note(keys[index]) for index in np.flatnonzero(new).tolist())
        self._cache.counters.computed_tokens += len(rows) * self.runtime.layout.block_size
        self._cache.counters.recomputed_tokens += again * self.runtime.layout.block_size
        self._copy_down.note_new()
        return ids

    def freed(self, pages: IntArray) -> None:
        """The engine gave these device pages up; a copy that is being read from them is worthless."""
        if not np.any(self._mirror.holds(pages)):
            return
        self._poll()
        ids = self._owner[pages[self._mirror.holds(pages)]]
        self._leave_pages(ids)
        self._reap(ids)

    def arrived(self, request_id: str, traits: RequestTraits, keys: list[bytes]) -> None:
        """A request with a prompt of these full blocks has joined the queue."""
        self._cache.policy.on_arrival(request_id, traits, keys, self._clock())

    def ended(self, request_id: str, outcome: Outcome | None) -> None:
        """A request is over; unknown ones are ignored."""
        self._cache.policy.on_finish(request_id, outcome, self._clock())

    def used(self, request_id: str, keys: list[bytes], num_prompt_tokens: int) -> None:
        """A request starts with these blocks as its cached prefix, wherever they are."""
        index, counters, table = self._cache.index, self._cache.counters, self._table
        known = [block_id for block_id in map(index.get, keys) if block_id is not None]
        ids = np.array(known, np.int32)
        counters.looked_up_tokens += num_prompt_tokens
        fetched = np.isin(ids, self.waiting.on_nvme(request_id)) & ~table.has(ids, Tier.HBM)
        counters.hit_tokens[Tier.NVME] += int(np.count_nonzero(fetched)) * self.runtime.layout.block_size
        for tier, there in table.by_fastest_tier(ids[~fetched]).items():
            counters.hit_tokens[tier] += len(there) * self.runtime.layout.block_size
        counters.used_blocks += len(ids)
        counters.used_in_hbm_blocks += int(np.count_nonzero(table.has(ids, Tier.HBM)))
        self._cache.prefetcher.note_needed(ids)
        self._cache.regret.note_needed(ids[~table.has(ids, Tier.HBM)], self._clock())
        self._cache.policy.on_use(table, ids, self._clock(), request_id)

    # -- asked by the engine -------------------------------------------------------------------------------------

    def find_in_dram(self, keys: list[bytes]) -> IntArray | None:
        """Ids of these blocks if all are in DRAM, else None; they stay there until ``load`` or ``let_go``."""
        known = [block_id for block_id in map(self._cache.index.get, keys) if block_id is not None]
        ids = np.array(known, np.int32)
        if len(ids) < len(keys) or not np.all(self._table.has(ids, Tier.DRAM)):
            return None
        self._holds.hold(ids)
        return ids

    def let_go(self, ids: IntArray) -> None:
        """The blocks found will not be loaded."""
        self._holds.let_go(ids)

    def load(self, ids: IntArray, pages: IntArray, watcher: LayerWatcher, ready: Ready | None) -> None:
        """Copy blocks from DRAM to device pages that the engine has set apart for requests, layer by layer.

        Args:
            ids: int32 ``[n]``, as found; a block that two requests want appears twice.
            pages: int32 ``[n]``, distinct.
            watcher: told of each layer.
            ready: see ``CopyJob``.
        """
        self._cache.mover.deliver(ids, Tier.DRAM, pages, watcher, ready)
        self.let_go(ids)

    # -- each step -----------------------------------------------------------------------------------------------

    def step(self, num_free_pages: int, ready: Ready | None) -> None:
        """Between two steps of the engine: commit, copy down ahead of need, keep room in DRAM.

        Args:
            num_free_pages: device pages that hold nothing.
            ready: see ``CopyJob``, for copies that read device pages.
        """
        self._poll()
        self._copy_down.ahead(num_free_pages, ready)
        self.runtime.rebalance([], [])
        self._copy_down.clean_dram()

    def copy_down_now(self, ids: IntArray, ready: Ready | None, timeout_s: float) -> None:
        """Blocks whose pages are about to be given up: copy them down and wait, within the deadline."""
        table = self._table
        alone = ids[(table.busy[ids] == 0) & (table.present[ids] == TIER_BIT[Tier.HBM])]
        self._copy_down.begin(alone, ready)
        self._cache.mover.wait(ids, timeout_s, self._clock())

    def in_flight(self, ids: IntArray) -> bool:
        """A copy from or to one of these blocks is under way."""
        return bool(np.any(self._table.busy[ids] != 0))

    def is_below(self, ids: IntArray) -> bool:
        """All of these blocks have a copy below HBM."""
        return bool(np.all((self._table.present[ids] & ~TIER_BIT[Tier.HBM]) != 0))

    def flush(self, timeout_s: float) -> None:
        """Forget everything, on all tiers, on the disk too. Waits for the copies in flight, within the deadline.

        What is still on its way to the disk then is made unreadable there when it has arrived.
        """
        deadline = time.monotonic() + timeout_s
        while self._cache.mover.num_in_flight and time.monotonic() < deadline:
            self.runtime.wait(POLL_S)
        self.waiting.forget_others([])
        self.freed(self._table.slots_of(self._table.on_tier(Tier.HBM), Tier.HBM))
        self.runtime.flush()

    # -- inside --------------------------------------------------------------------------------------------------

    def _move_in(self, ids: IntArray, pages: IntArray) -> None:
        """Note where in HBM the blocks are; a block that was noted elsewhere has moved."""
        table = self._table
        self._leave_pages(ids[table.has(ids, Tier.HBM)])
        self._mirror.claim(pages)
        table.place(ids, Tier.HBM, pages)
        table.settle(ids, Tier.HBM)
        self._owner[pages] = ids

    def _leave_pages(self, ids: IntArray) -> None:
        """These blocks, all in HBM, lose their pages; what is being read from those pages may be anything."""
        table = self._table
        read_from = ids[(table.busy[ids] != 0) & (table.present[ids] == TIER_BIT[Tier.HBM])]
        table.generation[read_from] += 1
        self._doomed = np.concatenate([self._doomed, read_from])
        table.drop(ids, Tier.HBM)

    def _publish(self, block_id: int, key: bytes, parent: bytes | None, position: int) -> None:
        index = self._cache.index
        if parent is None or not index.try_publish(block_id, key, parent, position):
            index.adopt(block_id, key)  # a head, or one whose predecessor was forgotten
        self._cache.counters.published_blocks += 1

    def _poll(self) -> None:
        self._cache.mover.poll(self._clock())
        if len(self._doomed):
            over = self._table.busy[self._doomed] == 0
            self._reap(self._doomed[over])
            self._doomed = self._doomed[~over]

    def _reap(self, ids: IntArray) -> None:
        """Forget blocks of which nothing is left, and with them what follows them."""
        table, index = self._table, self._cache.index
        gone = ids[(table.present[ids] == 0) & (table.arriving[ids] == 0) & (table.busy[ids] == 0)]
        for block_id in gone.tolist():
            if table.state[block_id] == BlockState.PUBLISHED:
                self._cache.room.release(np.array(index.unpublish(block_id), np.int32))
