"""Counters of the data path: written by the lanes, readable by anybody at any time."""

from __future__ import annotations

import threading
from collections import Counter
from dataclasses import dataclass, field, replace

from dflash2.types import Tier


@dataclass(slots=True)
class RouteStats:
    """Totals of one direction between two tiers since the start.

    Attributes:
        num_jobs: jobs ended, cancelled ones included.
        num_blocks: blocks that arrived.
        num_bytes: payload bytes of those.
        num_failed: blocks that did not.
        busy_s: seconds in which at least one batch of this route was being moved, summed over batches.
        latency_sum_s: submission to end, summed over jobs.
        latency_max_s: the longest of them.
        queued_blocks: blocks submitted and not ended.
    """

    num_jobs: int = 0
    num_blocks: int = 0
    num_bytes: int = 0
    num_failed: int = 0
    busy_s: float = 0.0
    latency_sum_s: float = 0.0
    latency_max_s: float = 0.0
    queued_blocks: int = 0


@dataclass(frozen=True, slots=True)
class TransferSnapshot:
    """The counters at one moment.

    Attributes:
        routes: by (source, destination).
        failures: failed blocks by reason: ``source``, ``destination``, ``staging timeout``, ``cancelled``,
            ``endurance budget``.
        staging_bytes: allocated for staging.
        staging_in_use_bytes: of these in use now.
        staging_peak_bytes: most ever in use at once.
    """

    routes: dict[tuple[Tier, Tier], RouteStats]
    failures: dict[str, int]
    staging_bytes: int
    staging_in_use_bytes: int
    staging_peak_bytes: int


@dataclass(slots=True)
class TransferStats:
    """Thread-safe accumulation."""

    _routes: dict[tuple[Tier, Tier], RouteStats] = field(default_factory=dict)
    _failures: Counter[str] = field(default_factory=Counter)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def submitted(self, route: tuple[Tier, Tier], num_blocks: int) -> None:
        """A job was queued."""
        with self._lock:
            self._routes.setdefault(route, RouteStats()).queued_blocks += num_blocks

    def batch_done(self, route: tuple[Tier, Tier], num_ok: int, num_failed: int, num_bytes: int, busy_s: float) -> None:
        """A batch ended."""
        with self._lock:
            stats = self._routes[route]
            stats.num_blocks += num_ok
            stats.num_failed += num_failed
            stats.num_bytes += num_bytes
            stats.busy_s += busy_s
            stats.queued_blocks -= num_ok + num_failed

    def job_done(self, route: tuple[Tier, Tier], latency_s: float) -> None:
        """A job ended."""
        with self._lock:
            stats = self._routes[route]
            stats.num_jobs += 1
            stats.latency_sum_s += latency_s
            stats.latency_max_s = max(stats.latency_max_s, latency_s)

    def failed(self, reason: str, num_blocks: int) -> None:
        """Blocks failed."""
        if num_blocks:
            with self._lock:
                self._failures[reason] += num_blocks

    def queued_blocks(self) -> int:
        """Blocks submitted and not ended, all routes."""
        with self._lock:
            return sum(stats.queued_blocks for stats in self._routes.values())

    def snapshot(self, staging_bytes: int, in_use_bytes: int, peak_bytes: int) -> TransferSnapshot:
        """A copy that does not change any more."""
        with self._lock:
            routes = {route: replace(stats) for route, stats in self._routes.items()}
            return TransferSnapshot(routes, dict(self._failures), staging_bytes, in_use_bytes, peak_bytes)
