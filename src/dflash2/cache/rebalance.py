"""Keeps room ahead of need: copies cold blocks down early and frees them before anybody has to wait (R-3.2)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from dflash2.cache.manager import CacheManager
from dflash2.config import PolicyConfig
from dflash2.policy.adaptive import AdaptiveThreshold, Evidence
from dflash2.table.page_table import TIER_BIT, BlockState
from dflash2.types import IntArray, Tier, Urgency


@dataclass(frozen=True, slots=True)
class Watermarks:
    """Shares of a tier's slots: demotion starts above ``high`` and stops below ``low``."""

    high: float
    low: float


class Rebalancer:
    """Runs between steps; a batch at a time, so that no burst is larger than ``swap_batch_size`` blocks.

    Args:
        cache: the manager whose blocks it moves.
        watermarks: for HBM and DRAM alike.
        refresh_interval_s: how often heat is recomputed.
        guard: moves the threshold when demotions are regretted; None to leave it where it is.
        tiers: where it keeps room, fastest first; not HBM where an engine of its own gives out the slots.
    """

    def __init__(
        self,
        cache: CacheManager,
        watermarks: Watermarks,
        refresh_interval_s: float,
        guard: AdaptiveThreshold | None,
        tiers: Sequence[Tier] = (Tier.HBM, Tier.DRAM),
    ) -> None:
        self._cache = cache
        self.watermarks = watermarks
        self.refresh_interval_s = refresh_interval_s
        self.guard = guard
        self._tiers = tuple(tiers)
        self._next_refresh = -np.inf
        self._judged = (0, 0)
        """Blocks used, and of these not in HBM, at the last refresh."""
        self._draining: set[Tier] = set()
        """Tiers that have been above their high watermark and not yet at their low one."""
        self._all_hot: dict[Tier, tuple[float, int, int]] = {}
        """Tiers where nothing was cold, and under which circumstances: until these change nobody looks again."""

    def run(self, leaving_next: IntArray, now: float) -> None:
        """One round.

        Args:
            leaving_next: int32, blocks of resident sequences that will have to make room soon.
            now: the step's time.
        """
        if now >= self._next_refresh:
            self._next_refresh = now + self.refresh_interval_s
            self._refresh(now)
            self._all_hot.clear()
        for tier in self._tiers:
            self._demote_cold(tier, now)
        self._copy_early(leaving_next, now)

    def configure(self, settings: PolicyConfig) -> None:
        """Take over settings that were changed while running; in effect from the next round on."""
        self.watermarks = Watermarks(settings.high_watermark, settings.low_watermark)
        self.refresh_interval_s = settings.refresh_interval_s
        self._next_refresh = -np.inf
        self._cache.policy.cold_threshold = settings.cold_threshold
        if not settings.adaptive:
            self.guard = None
        elif self.guard is None:
            self.guard = AdaptiveThreshold(settings.cold_threshold)

    def spare_hbm_slots(self) -> int:
        """Free HBM slots above what the high watermark keeps for new blocks and what running requests were promised."""
        kept = max(self._kept_free(Tier.HBM), self._cache.residency.num_promised)
        return max(0, self._cache.table.num_free(Tier.HBM) - kept)

    def _kept_free(self, tier: Tier) -> int:
        """Slots above the high watermark."""
        capacity = self._cache.table.capacity(tier)
        return capacity - int(self.watermarks.high * capacity)

    def _refresh(self, now: float) -> None:
        cache = self._cache
        cache.policy.refresh(cache.table, now)
        cache.regret.horizon_s = cache.policy.horizon_s(now)
        evidence = self._evidence()
        if self.guard is None:
            cache.policy.effective_threshold = cache.policy.cold_threshold
            return
        self.guard.configure(cache.policy.cold_threshold)
        self.guard.note(evidence)
        cache.policy.effective_threshold = self.guard.update()

    def _evidence(self) -> Evidence:
        """For the guard, since the last call."""
        demoted, regretted = self._cache.regret.take()
        counters = self._cache.counters
        (used, missed), self._judged = self._judged, (counters.used_blocks, counters.num_missed_blocks)
        return Evidence(demoted, regretted, self._judged[0] - used, self._judged[1] - missed)

    def _demote_cold(self, tier: Tier, now: float) -> None:
        """From above the high watermark on, free the coldest down to the low one, a batch a round."""
        cache = self._cache
        table = cache.table
        if tier is Tier.DRAM and cache.mover.spares_nvme:
            return
        wanted = self._surplus(tier)
        num_used = 0 if tier is Tier.HBM else table.num_used(tier)  # what is new in HBM is pinned
        circumstances = (cache.policy.effective_threshold, table.num_unpins, num_used)
        if not wanted or self._all_hot.get(tier) == circumstances:
            return
        idle = cache.room.idle(tier)
        cold = idle[cache.policy.is_cold(table, idle, now)]
        if tier is Tier.HBM:
            cold = cache.prefetcher.without_outstanding(cold)  # or they would be loaded twice for one use
        victims = cache.policy.order(table, cold, min(wanted, cache.mover.batch_blocks), now)
        if not len(victims):
            self._draining.discard(tier)  # all is hot: wait until the high watermark is passed again
            self._all_hot[tier] = circumstances
            return
        if tier is Tier.HBM:
            # Those without a copy of their own cost as much when they come back: they count for the guard as well.
            dirty = cache.room.free_clean(victims)
            cache.regret.note_demoted(victims[~table.has(victims, Tier.HBM)], now)
            cache.regret.note_demoted(cache.room.demote(dirty, tier, now), now)
            return
        elsewhere = (table.present[victims] & table.lasting & ~TIER_BIT[tier]) != 0
        table.drop(victims[elsewhere], tier)
        cache.room.demote(victims[~elsewhere], tier, now)

    def _surplus(self, tier: Tier) -> int:
        """Slots to free on the tier: 0 until the high watermark is passed, then those above the low one."""
        table = self._cache.table
        capacity = table.capacity(tier)
        used = table.num_used(tier) - self._cache.mover.leaving(tier)
        if used > self.watermarks.high * capacity:
            self._draining.add(tier)
        surplus = int(used - self.watermarks.low * capacity)
        if surplus <= 0:
            self._draining.discard(tier)
        return surplus if tier in self._draining else 0

    def _copy_early(self, leaving_next: IntArray, now: float) -> None:
        """Copy full blocks that will be demoted soon into free DRAM slots: freeing them later costs nothing."""
        cache = self._cache
        table = cache.table
        if not len(leaving_next):
            return
        spare = min(table.num_free(Tier.DRAM) - self._kept_free(Tier.DRAM), cache.mover.batch_blocks)
        if spare <= 0 or cache.mover.num_in_flight:
            return
        full = (table.state[leaving_next] == BlockState.SEALED) | (table.state[leaving_next] == BlockState.PUBLISHED)
        only_hbm = table.present[leaving_next] == TIER_BIT[Tier.HBM]
        idle = (table.arriving[leaving_next] == 0) & (table.busy[leaving_next] == 0)
        cache.mover.copy(leaving_next[full & only_hbm & idle][:spare], Tier.HBM, Tier.DRAM, Urgency.SPECULATIVE)
