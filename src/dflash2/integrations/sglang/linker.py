"""SGLang's interface for everything below HBM, served by the keeper. All calls come on the scheduler's thread."""

from __future__ import annotations

import contextlib
import logging
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from sglang.srt.mem_cache.hicache_storage import PoolName
from sglang.srt.mem_cache.unified_cache.unified_cache_linker import LayerWiseLoadCounter, UnifiedCacheLinker
from sglang.srt.mem_cache.utils import get_storage_hash_str

from dflash2.integrations.sglang.build import Placement, build_keeper
from dflash2.integrations.sglang.copy_down import Ready
from dflash2.integrations.sglang.device_heat import DeviceHeat
from dflash2.integrations.sglang.layers import CounterWatcher
from dflash2.integrations.sglang.metrics import SchedulerMetrics
from dflash2.integrations.sglang.nvme_waits import NvmeWaits
from dflash2.integrations.sglang.page import show_page
from dflash2.integrations.sglang.promises import Promises
from dflash2.integrations.sglang.queue_order import QueueOrder
from dflash2.policy.base import Outcome, RequestTraits
from dflash2.types import IntArray, Tier

logger = logging.getLogger(__name__)

IDLE_WAIT_S = 0.001
"""Longest single wait for copies where the engine has nothing else to do."""
FLUSH_WAIT_S = 2.0
RETRACT_WAIT_S = 0.5
"""Longest time that a retraction waits for the last blocks of the request to be copied down."""
LOOK_FOR_GONE_EVERY = 1000
"""Steps between two looks for requests that left the queue without a word: there should be none."""


@dataclass(slots=True)
class _Offload:
    """A node of SGLang's tree that stays locked until its blocks need its pages no longer."""

    ids: IntArray
    seen_by_step: bool = False


class DFlash2Linker(UnifiedCacheLinker):  # type: ignore[misc]
    """See ``UnifiedCacheLinker``.

    A request's blocks are loaded from DRAM only, which cannot fail; those on NVMe are brought to DRAM first, while the
    request waits in the queue (``nvme_waits``).
    """

    def __init__(
        self,
        server_args: Any,
        params: Any,
        *,
        components: Any,
        extra_config: dict[str, Any],
        forward_stream: Any = None,
    ) -> None:
        self.forward_stream = forward_stream
        self.page_size = params.page_size
        self._allocator = params.token_to_kv_pool_allocator
        self._placement = Placement.current()
        self.keeper, self._keys = build_keeper(
            params, components, extra_config["path"], self._placement, forward_stream
        )
        runtime = self.keeper.runtime
        self.promises = Promises(runtime)
        self.order = QueueOrder()
        self._heat_decides = runtime.config.policy.eviction == "heat"
        self.device_heat = DeviceHeat(runtime.cache.table.capacity(Tier.HBM), runtime.clock)
        self.has_nvme = runtime.cache.table.capacity(Tier.NVME) > 0
        self.pools = {PoolName.KV: runtime.pools[Tier.HBM]}
        self.layer_done_counter = LayerWiseLoadCounter(runtime.layout.num_layers)
        self._queued: dict[str, tuple[IntArray, IntArray]] = {}
        self._loading: dict[str, list[bytes]] = {}
        self._offloads: deque[_Offload] = deque()
        self.nvme_waits = NvmeWaits()
        self.parent_hashes: list[str] = []
        """Page hashes of what precedes the node that is offloaded next; set by a hook."""
        self.inserting: str | None = None
        """The request whose KV is going into SGLang's tree; set by a hook."""
        self.retracting = False
        """A retraction inserts nodes whose pages are wanted in the same step: they must not be locked."""
        self.waiting_rids: Callable[[], list[str]] = list
        """The requests in SGLang's queue; set by a hook."""
        self._num_steps = 0
        self._retract_until = 0.0
        self.num_retractions = 0
        self._metrics = SchedulerMetrics(runtime.stats(), self._placement.tp_rank)
        self._watch_frees()
        own = self._placement.rank % self._placement.ranks_per_machine
        self._page = show_page(runtime, runtime.config.page_port, own)
        logger.info(runtime.startup_line())

    # -- SGLang asks ---------------------------------------------------------------------------------------------

    def lookup(self, rid: str, transfers: list[Any]) -> list[int]:
        """Lengths, in pages, of the tail that can be loaded now; what is on NVMe is brought up meanwhile."""
        found = self.keeper.waiting.restorable(rid, self._keys.of(transfers[0].keys))
        if found.num_ready < len(found.ids) and not self.nvme_waits.gave_up(rid):
            in_front = self.keeper.waiting.in_front(rid)
            if in_front:
                self.keeper.waiting.bring_up(rid)
            self.nvme_waits.note(rid, started=in_front)
        else:
            self.nvme_waits.over(rid)
        return list(range(1, found.num_ready + 1))

    def let_copies_run(self) -> None:
        """The engine has nothing to do but wait for copies: their threads may have the interpreter for a moment."""
        self.keeper.runtime.wait(IDLE_WAIT_S)

    def load(self, rid: str, transfers: list[Any]) -> bool:
        """Queue a load into the request's own device pages."""
        keys = self._keys.of(transfers[0].keys)
        ids = self.keeper.find_in_dram(keys)
        if ids is None:
            return False
        self._loading[rid] = keys
        self._queued[rid] = (ids, self._pages(transfers[0].device_indices))
        return True

    def start_layer_wise_loading(self) -> int:
        """One job for all loads of the batch, layer by layer."""
        if not self._queued:
            return -1
        index: int = self.layer_done_counter.update_producer()
        ids = np.concatenate([ids for ids, _ in self._queued.values()])
        pages = np.concatenate([pages for _, pages in self._queued.values()])
        self._queued.clear()
        self.keeper.load(ids, pages, CounterWatcher(self.layer_done_counter, index), self._ready())
        return index

    def finish_layer_wise_loading(self, counter_index: int) -> bool:
        """See ``UnifiedCacheLinker``."""
        landed: bool = self.layer_done_counter.finish(counter_index)
        return landed

    def cancel_queued_load(self, rid: str) -> bool:
        """See ``UnifiedCacheLinker``."""
        ids, _ = self._queued.pop(rid, (None, None))
        if ids is None:
            return False
        self.keeper.let_go(ids)
        return True

    def num_expected_tokens(self, rid: str) -> int:
        """Tokens of a waiting request that are below the device, as of its last ``lookup``; on this rank."""
        return self.keeper.waiting.num_blocks(rid) * int(self.page_size)

    def forget_request(self, rid: str) -> None:
        """The request runs now, or is gone."""
        self.keeper.waiting.forget(rid)
        self.order.leave(rid)
        self._loading.pop(rid, None)
        self.nvme_waits.forget(rid)

    def offload(self, transfers: list[Any], session_id: str | None = None) -> bool:
        """Note the pages of a new node; whether and when they are copied down is the keeper's business."""
        self.device_heat.used(transfers[0].keys)
        before = self._keys.of(self.parent_hashes[-1:])
        ids = self.keeper.announce(
            self.inserting,
            self._keys.of(transfers[0].keys),
            before[0] if before else None,
            len(self.parent_hashes),
            self._pages(transfers[0].device_indices),
        )
        if self.retracting:
            self.keeper.copy_down_now(ids, self._ready(), max(0.0, self._retract_until - time.monotonic()))
            return False
        self._offloads.append(_Offload(ids))
        return True

    def num_completed_offloads(self) -> int:
        """Nodes whose lock may go. SGLang asks once in each step, so this is where the keeper's step is done."""
        self.keeper.step(self._allocator.available_size() // self.page_size, self._ready())
        self._num_steps += 1
        if self._num_steps % LOOK_FOR_GONE_EVERY == 0:
            self.keeper.waiting.forget_others(self.waiting_rids())
        if self._metrics.is_due:
            self._metrics.write(self.keeper.runtime.stats())
        done = 0
        for offload in self._offloads:
            if self.keeper.in_flight(offload.ids):
                break
            done += 1
        return done

    def pop_completed_offload(self) -> bool:
        """The keeper has taken over: the node needs no further offload."""
        self._offloads.popleft()
        return True

    def reset(self) -> None:
        """Flush: nothing that was cached is used again, after a restart either."""
        for ids, _ in self._queued.values():
            self.keeper.let_go(ids)
        self._queued.clear()
        self._offloads.clear()
        self.nvme_waits.clear()
        self.keeper.flush(FLUSH_WAIT_S)
        self.layer_done_counter.reset()
        self.device_heat.clear()
        self._keys.renew()
        logger.info("DFlash2: flushed on all tiers")

    def weights_changed(self) -> None:
        """SGLang has loaded other weights, and may go on with what it cached."""
        self._keys.weights_changed()

    def close(self) -> None:
        """See ``UnifiedCacheLinker``."""
        if self._page is not None:
            self._page.close()
        self.keeper.runtime.shutdown()

    # -- requests ------------------------------------------------------------------------------------------------

    def arrived(self, rid: str, session: str | None, prompt: Any) -> None:
        """A request has joined the queue for the first time; ``prompt`` is SGLang's key of it."""
        whole = prompt.page_aligned(self.page_size)
        hashes = get_storage_hash_str(whole, None, page_size=self.page_size) if len(whole) else []
        traits = RequestTraits(session=session, num_prompt_tokens=len(prompt))
        self.keeper.arrived(rid, traits, self._keys.of(hashes))

    def ended(self, rid: str, outcome: Outcome | None) -> None:
        """The request is over, or was never started."""
        self.forget_request(rid)
        self.promises.ended(rid, outcome)
        self.keeper.ended(rid, outcome)

    def admitted(self, rid: str, device_hashes: list[str], num_tokens: int) -> None:
        """A request of so many tokens starts; these pages of its prefix were on the device."""
        self.device_heat.used(device_hashes)
        self.keeper.used(rid, [*self._keys.of(device_hashes), *self._loading.get(rid, [])], num_tokens)
        self.forget_request(rid)

    @contextlib.contextmanager
    def sparing_hot_leaves(self) -> Iterator[Callable[[], bool]]:
        """Inside, ``device_heat`` passes hot leaves over; what is given tells whether it did."""
        before = self.device_heat.num_spared
        self.device_heat.begin(sparing=self._heat_decides)
        try:
            yield lambda: self.device_heat.num_spared > before
        finally:
            self.device_heat.begin(sparing=False)

    def note_retraction(self, rid: str) -> None:
        """Say so; a retraction means that the device pool was short."""
        self.num_retractions += 1
        self._retract_until = time.monotonic() + RETRACT_WAIT_S
        logger.info("dflash2_swap retraction %d: the KV of request %s is kept", self.num_retractions, rid)

    # -- inside --------------------------------------------------------------------------------------------------

    def _pages(self, device_indices: torch.Tensor) -> IntArray:
        pages: IntArray = (device_indices[:: self.page_size] // self.page_size).cpu().numpy().astype(np.int32)
        return pages

    def _ready(self) -> Ready | None:
        """Waits, in a copying thread, for what the device still writes; None where the host computes."""
        if self.forward_stream is None or not torch.cuda.is_available():
            return None
        events = self.record_offload_ready()

        def wait_for_device() -> None:
            for event in events:
                event.synchronize()

        return wait_for_device

    def _watch_frees(self) -> None:
        """Tell the keeper which pages SGLang gives up, whatever the reason."""
        release = self._allocator._release_page_ids

        def release_and_tell(*page_ids: torch.Tensor) -> None:
            for each in page_ids:
                self.keeper.freed(each.cpu().numpy().astype(np.int32))
            release(*page_ids)

        self._allocator._release_page_ids = release_and_tell
