"""The face that an engine talks to. Nothing here waits unless its documentation says so."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from dflash2.cache.disk_upkeep import DiskUpkeep
from dflash2.cache.inspection import BlockInspector
from dflash2.cache.sequence import Residency, Sequence
from dflash2.config.changing import limits, running_values, with_changes
from dflash2.errors import CapacityError, ConfigError, DeadlineExceeded, StorageError
from dflash2.monitoring.advice import Advisor
from dflash2.monitoring.disk_watch import DiskWatch
from dflash2.monitoring.observer import Observer
from dflash2.monitoring.swap_log import SwapLog
from dflash2.policy.base import Outcome, RequestTraits
from dflash2.policy.saved import save_policy
from dflash2.pools.nvme import NvmePool
from dflash2.runtime.parts import RuntimeParts
from dflash2.runtime.promises import SequencePromises
from dflash2.runtime.prompts import Prompts, distinct_blocks
from dflash2.runtime.report import Report
from dflash2.table.keys import KeyNamespace
from dflash2.types import TIERS_BELOW_HBM, IntArray, Tier

logger = logging.getLogger(__name__)

POLL_S = 0.05
"""Longest single wait inside a bounded one; a completion ends it at once."""


class Runtime:
    """Memory of one rank: sequences in, HBM slots out.

    The order for an engine of your own: ``open`` a sequence for a prompt (None: no room yet), then for each step
    ``prepare_step`` with the sequences that take part, run the model on the slots it names, ``complete_step`` with the
    tokens whose KV was written; ``pause`` a sequence to let others have its HBM; ``close`` it at the end; ``rebalance``
    between steps. All from one thread.

    Args:
        parts: see ``RuntimeParts``.
        namespace: what KV depends on besides the tokens.
        clock: seconds; carried through every decision, so that ranks with the same clock decide alike.
    """

    def __init__(
        self, parts: RuntimeParts, namespace: KeyNamespace, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.config = parts.config
        """What is in effect: the file, and what ``set_policy`` has changed since."""
        self.layout = parts.layout
        self.pools = parts.pools
        self._hbm_tensor = parts.hbm_tensor
        self.cache = parts.cache
        self.ledger = parts.ledger
        self.fallback_reason = parts.fallback_reason
        self.clock = clock
        self._largest_batch = parts.config.policy.swap_batch_size
        self._policy_file = parts.policy_file
        self._transfer = parts.transfer
        self._rebalancer = parts.rebalancer
        swap_log = SwapLog(parts.cache.table, parts.cache.counters, time.monotonic())
        nvme = parts.pools.get(Tier.NVME)
        disk = DiskWatch(nvme.folder) if isinstance(nvme, NvmePool) else None
        self._disk = DiskUpkeep(parts.cache, nvme if isinstance(nvme, NvmePool) else None, parts.ledger)
        self.observer = Observer(swap_log, parts.history, Advisor(), disk)
        self.stats_of: dict[str, Callable[[], Any]] = {}
        """Further statistics by their name in ``stats()``, such as those of an engine's scheduler."""
        self.promises = SequencePromises(parts.cache, parts.ledger, parts.layout)
        self.prompts = Prompts(parts.cache, namespace, clock)
        self._report = Report(parts)
        self._closed = False

    @property
    def can_swap(self) -> bool:
        """There is a tier below HBM."""
        return any(self.cache.table.capacity(tier) for tier in TIERS_BELOW_HBM)

    @property
    def hbm_tensor(self) -> Any:
        """The fast pool, a torch tensor ``[num_slots, num_layers, 2, block_size, num_kv_heads, head_dim]``.

        Its address never changes. Read and write only the slots that ``prepare_step`` names.
        """
        return self._hbm_tensor

    # -- requests ------------------------------------------------------------------------------------------------

    def open(
        self,
        request_id: str,
        token_ids: IntArray,
        max_new_tokens: int,
        *,
        num_branches: int = 1,
        adapter: str | None = None,
        tenant_salt: str | None = None,
        traits: RequestTraits | None = None,
    ) -> Sequence | None:
        """Reserve blocks for a request, for all its branches or not at all, and look up its cached prefix.

        Args:
            request_id: unique among the open requests.
            token_ids: int32 ``[n]``, the prompt.
            max_new_tokens: the most tokens that will follow, in each branch.
            num_branches: sequences that ``fork`` will make of it, itself included.
            adapter: identity of a LoRA adapter's weights; None for the base model.
            tenant_salt: only requests with the same salt share blocks.
            traits: what else is known of the request; helps to predict when its blocks are used again.

        Returns:
            The sequence, or None if its blocks are not to be had now (nothing has changed).

        Raises:
            RequestTooLarge: they never will be.
        """
        at_once, needed = self.promises.needed_blocks(len(token_ids), max_new_tokens, num_branches)
        if not self.ledger.try_reserve(request_id, needed, at_once):
            self.cache.counters.reservations_refused += 1
            return None
        self.cache.counters.reservations += 1
        sequence = self.open_unreserved(request_id, token_ids, adapter=adapter, tenant_salt=tenant_salt, traits=traits)
        self.promises.hold(sequence, request_id)
        return sequence

    def fork(self, sequence: Sequence, request_id: str) -> Sequence:
        """A second sequence with the same past and under the same promise, paused.

        They share every block. The last one, where it is not full, is copied by the first of them that writes to it.

        Args:
            sequence: open; its blocks may be on any tier.
            request_id: of the new one; unique among the open ones.
        """
        twin = self.cache.fork(sequence, request_id)
        if sequence.promise is not None:
            self.promises.hold(twin, sequence.promise)
        return twin

    def try_keep(self, sequence: Sequence, name: str, num_blocks: int) -> Sequence | None:
        """Hold the first full blocks of a sequence beyond its end: they may be moved, not forgotten.

        Args:
            sequence: open; has so many full blocks.
            name: of the promise that covers them, until the returned sequence is closed.
            num_blocks: how many.

        Returns:
            None, and no change, if they cannot be promised, or if no tier could take them from HBM.
        """
        if not self.can_swap or not self.ledger.try_reserve(name, num_blocks):
            return None
        kept = self.cache.fork(sequence, name)
        self.cache.truncate(kept, num_blocks)
        self.promises.hold(kept, name)
        return kept

    def open_unreserved(
        self,
        request_id: str,
        token_ids: IntArray,
        *,
        adapter: str | None = None,
        tenant_salt: str | None = None,
        traits: RequestTraits | None = None,
    ) -> Sequence:
        """As ``open``, without a promise: for engines that recompute when memory is short."""
        root = self.prompts.root(adapter, tenant_salt)
        return self.cache.open(request_id, root, token_ids, self.clock(), traits)

    def close(self, sequence: Sequence, outcome: Outcome | None = None) -> None:
        """End a request in whatever state it is; its full blocks stay as cache. Idempotent.

        Args:
            sequence: any.
            outcome: how the request ended, where that is known.
        """
        if not sequence.closed:
            self.cache.close(sequence, self.clock(), outcome)
            self.promises.release(sequence)

    def drop(self, sequence: Sequence) -> None:
        """Give up the blocks and the promise of an open sequence whose request goes on.

        It comes back by ``open`` or ``open_unreserved`` under the same id, or ends by ``end_dropped``.
        """
        self.cache.drop(sequence, self.clock())
        self.promises.release(sequence)

    def end_dropped(self, request_id: str, outcome: Outcome | None = None) -> None:
        """A request that was dropped will not come back; without effect on others. Arguments as for ``close``."""
        self.cache.end_dropped(request_id, self.clock(), outcome)

    def join_prefix(self, sequence: Sequence, token_ids: IntArray) -> bytes | None:
        """Before a prompt is computed further: take over what others have computed of it since ``open``.

        Args:
            sequence: may be entering again afterwards.
            token_ids: int32 ``[n]``, the whole prompt.

        Returns:
            Key of the block that would be computed next, if it is a whole one: of two sequences with the same key in
            one step the second had better wait and take it over. None for the end of the prompt.
        """
        self.cache.join_prefix(sequence, token_ids, self.clock())
        return self.cache.next_block_key(sequence, token_ids)

    # -- residency -----------------------------------------------------------------------------------------------

    def try_enter(self, sequence: Sequence, growth_tokens: int) -> bool:
        """Begin to bring a paused sequence into HBM, with room for ``growth_tokens`` more.

        Returns:
            False if HBM cannot hold it together with those already in; nothing has changed.
        """
        return self.cache.residency.try_enter(sequence, growth_tokens, self.clock())

    def advance_entering(self, sequence: Sequence) -> bool:
        """Carry on what ``try_enter`` began; True once a step may use the sequence."""
        return self.cache.residency.advance_entering(sequence, self.clock())

    def pause(self, sequence: Sequence) -> None:
        """Let others have its HBM: its blocks may be swapped out from now on. Nothing is lost."""
        self.cache.residency.leave(sequence, self.clock())

    def recover(self, sequence: Sequence, *, give_up_loads: bool = False) -> int | None:
        """Cut an entering sequence back to what can still be had, after a copy was lost or took too long.

        Args:
            sequence: is paused by this if it has to be cut.
            give_up_loads: cut before the first block that is not in HBM yet, too.

        Returns:
            Number of tokens left, whose successors must be computed again; None if nothing is missing.
        """
        cache = self.cache
        keep = cache.residency.first_lost(sequence)
        if keep is None and give_up_loads:
            absent = np.flatnonzero(~cache.table.has(sequence.block_ids, Tier.HBM))
            keep = int(absent[0]) if len(absent) else None
        if keep is None:
            return None
        cut = sequence.block_ids[keep:].copy()
        cache.residency.leave(sequence, self.clock())
        cache.truncate(sequence, keep)
        self.promises.cover_copies(sequence, cut)
        return sequence.num_tokens

    # -- steps ---------------------------------------------------------------------------------------------------

    def prepare_step(self, work: list[tuple[Sequence, int]], timeout_s: float = 30.0) -> list[IntArray]:
        """Bring sequences into HBM, pin them, and take the blocks their new tokens will be written to. Waits.

        Args:
            work: (sequence, number of new tokens) for each sequence of the step.
            timeout_s: longest wait for loads, in real time whatever ``clock`` says.

        Returns:
            For each sequence int32 ``[blocks]``: its HBM slots, covering the new tokens.

        Raises:
            CapacityError: the sequences do not fit HBM together; pause some.
            DeadlineExceeded: the loads took too long; ``recover`` the sequences or try again.
            StorageError: blocks of a sequence were lost; ``recover`` it and compute them again.
        """
        deadline = time.monotonic() + timeout_s  # the clock of decisions may stand still in a step
        for sequence, num_new in work:
            paused = sequence.residency is Residency.PAUSED
            if not (
                self.try_enter(sequence, num_new) if paused else self.cache.residency.try_extend(sequence, num_new)
            ):
                raise CapacityError(
                    f"sequence {sequence.request_id} with {num_new} new tokens does not fit HBM beside the others"
                )
        for sequence, num_new in work:
            while not self._try_prepare(sequence, num_new):
                left_s = deadline - time.monotonic()
                if left_s <= 0:
                    raise DeadlineExceeded(f"sequence {sequence.request_id} was not in HBM after {timeout_s} s")
                self.wait(min(POLL_S, left_s))
        return [sequence.hbm_slots for sequence, _ in work]

    def complete_step(self, work: list[tuple[Sequence, IntArray]]) -> None:
        """The KV of these tokens has been written. After a failed step do not call it; prepare the step again."""
        self.cache.advance(work)

    def rebalance(self, leaving_next: list[Sequence], upcoming: list[Sequence]) -> None:
        """Between steps: commit what has been copied, demote, prefetch.

        Args:
            leaving_next: resident sequences that will be paused soon.
            upcoming: paused sequences in the order in which they run next.
        """
        now = self.clock()
        self.poll()
        self.observer.step(self)
        if self.can_swap:
            self._rebalancer.run(distinct_blocks(leaving_next), now)
            spare = self._rebalancer.spare_hbm_slots()
            self.cache.prefetcher.run(self.prompts.next_uses(upcoming), spare, now)

    def poll(self) -> None:
        """Commit copies that have ended."""
        self.cache.mover.poll(self.clock())
        self._disk.run()

    def wait(self, timeout_s: float) -> None:
        """Wait for a copy in flight, if there is one, at most so long, and commit it."""
        self.cache.mover.wait_any(timeout_s, self.clock())
        self._disk.run()

    # -- settings ------------------------------------------------------------------------------------------------

    def set_policy(self, **changes: Any) -> dict[str, Any]:
        """Change settings while running; they are in effect from the next round of ``rebalance`` on.

        Args:
            changes: new values by the names in the file: ``cold_threshold``, ``swap_batch_size``, ``adaptive``,
                ``high_watermark``, ``low_watermark``, ``refresh_interval_s``, ``prefetch_window``.

        Returns:
            All of these settings as they are now.

        Raises:
            ConfigError: a value or a name is not valid; nothing has changed.
        """
        config = with_changes(self.config, changes)
        if config.policy.swap_batch_size > self._largest_batch:
            raise ConfigError(
                f"at most {self._largest_batch} while running: staging was sized for that", "policy.swap_batch_size"
            )
        before, after = running_values(self.config), running_values(config)
        for name, value in after.items():
            if value != before[name]:
                logger.info("%s changed from %s to %s", name, before[name], value)
        self.config = config
        self._rebalancer.configure(config.policy)
        self.cache.mover.batch_blocks = config.policy.swap_batch_size
        self.cache.prefetcher.window.configure(config.kv_block.prefetch_window)
        return after

    def policy_limits(self) -> dict[str, tuple[float, float]]:
        """Smallest and largest value of each setting that has a range and may be changed while running."""
        return {**limits(), "swap_batch_size": (1, self._largest_batch)}

    # -- the whole -----------------------------------------------------------------------------------------------

    def flush(self) -> None:
        """Forget everything cached, on all tiers, and make it unreadable on NVMe.

        Open sequences keep their blocks; on NVMe these are no longer found by a later run.
        """
        self._disk.flush()

    def replace_weights(self, weights_version: str) -> None:
        """The model has other weights from now on: nothing that the old ones computed is found any more.

        End or recompute the open sequences: what they hold is of the old weights.
        """
        self.prompts.replace_weights(weights_version)
        self.flush()

    def startup_line(self) -> str:
        """The line of SPEC 5.2 or, when DFlash2 is off, of SPEC 5.3."""
        return self._report.startup_line()

    def stats(self) -> dict[str, Any]:
        """Nested counters and gauges, JSON-able. Sizes in blocks unless the name says otherwise."""
        more = {name: source() for name, source in self.stats_of.items()}
        return {**self._report.stats(self.config), "warnings": self.observer.advisor.given, **more}

    def blocks(self, count: int) -> dict[str, Any]:
        """The ``count`` hottest and coldest blocks, with why, and the histogram of heat; see ``BlockInspector``."""
        cache = self.cache
        inspector = BlockInspector(cache.table, cache.index, cache.policy, cache.regret.misses)
        return inspector.report(count, self.clock())

    def worst_blocks(self) -> list[tuple[int, int]]:
        """(block_id, misses) of the blocks that were most often not in HBM when they were needed."""
        return self.cache.regret.misses.worst(10)

    def check_integrity(self) -> None:
        """Raise IntegrityError if any invariant of table, index, sequences, promises or transfers is broken."""
        self.cache.check_integrity()
        self.ledger.check_integrity()
        self._transfer.check_integrity()

    def shutdown(self, timeout_s: float = 10.0) -> None:
        """Keep on NVMe what is worth it, stop the copies, and give the memory back. Idempotent.

        Within the deadline; the log says what was dropped.
        """
        if self._closed:
            return
        self._closed = True
        self._disk.drain(timeout_s / 2, self.clock())
        if self._policy_file is not None:
            save_policy(self.cache.policy, self._policy_file)
        self.observer.close()
        self._transfer.close(timeout_s / 2)
        for pool in self.pools.values():
            pool.close()

    def _try_prepare(self, sequence: Sequence, num_new: int) -> bool:
        now = self.clock()
        if sequence.residency is Residency.ENTERING and not self.cache.residency.advance_entering(sequence, now):
            if self.cache.residency.first_lost(sequence) is not None:
                raise StorageError(f"blocks of sequence {sequence.request_id} cannot be read any more; recover it")
            return False
        return self.cache.residency.try_grow(sequence, num_new, now)
