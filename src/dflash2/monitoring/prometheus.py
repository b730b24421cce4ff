"""Statistics as Prometheus metrics. The names are stable: renaming one is a breaking change.

``METRICS`` says where in the nested statistics each metric is found. A series whose value is not there (a part that
is switched off) is exported as zero, so that every series exists from the first scrape on.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from dflash2.types import Tier

CONTENT_TYPE = CONTENT_TYPE_LATEST
PREFIX = "dflash2_"
TIERS = tuple(tier.label for tier in Tier)


@dataclass(frozen=True, slots=True)
class Series:
    """One metric and where its value is.

    Attributes:
        name: without the prefix and without ``_total``, in base units.
        kind: counters only grow, gauges do not.
        help: one sentence.
        path: keys from the top of the statistics to the number; ``{tier}`` in a key stands for each tier's name
            and makes it a label.
    """

    name: str
    kind: Literal["counter", "gauge"]
    help: str
    path: tuple[str, ...]

    @property
    def per_tier(self) -> bool:
        """True if there is one series for each tier."""
        return any("{tier}" in key for key in self.path)


def _gauge(name: str, text: str, *path: str) -> Series:
    return Series(name, "gauge", text, path)


def _counter(name: str, text: str, *path: str) -> Series:
    return Series(name, "counter", text, path)


METRICS: tuple[Series, ...] = (
    _gauge("engine_up", "1 while the engine serves requests.", "server", "engine_up"),
    _gauge("enabled", "1 if DFlash2 is on, 0 if it is in fallback.", "enabled"),
    _gauge("http_requests_running", "HTTP requests under way.", "server", "http_requests_running"),
    # Requests in the engine.
    _gauge("requests_waiting", "Requests not admitted yet.", "scheduler", "waiting_requests"),
    _gauge("requests_paused", "Admitted requests whose blocks may be swapped out.", "scheduler", "paused_requests"),
    _gauge("requests_resident", "Requests whose blocks are kept in HBM.", "scheduler", "resident_requests"),
    _gauge("running_tokens_peak", "Most tokens whose KV was held at one time.", "scheduler", "peak_running_tokens"),
    _counter("requests_admitted", "Requests that were admitted.", "scheduler", "admitted_requests"),
    _counter("requests_timed_out", "Requests not admitted in time.", "scheduler", "timed_out_requests"),
    _counter("preemptions_swapped", "Requests paused to make room, KV kept.", "scheduler", "preemptions_swapped"),
    _counter("preemptions_recomputed", "Requests whose KV was given up.", "scheduler", "preemptions_recomputed"),
    _counter("load_timeouts", "Loads given up and computed again.", "scheduler", "load_timeouts"),
    # Memory.
    _gauge("block_size_bytes", "Bytes of one block.", "block_bytes"),
    _gauge("tier_capacity_blocks", "Blocks that fit the tier.", "tiers", "{tier}", "capacity_blocks"),
    _gauge("tier_capacity_bytes", "Bytes of the blocks that fit the tier.", "tiers", "{tier}", "pool_bytes"),
    _gauge("tier_used_blocks", "Blocks that have a copy on the tier.", "tiers", "{tier}", "used_blocks"),
    _gauge("tier_retired_blocks", "Slots no longer used, after faults.", "tiers", "{tier}", "retired_blocks"),
    _gauge("pinned_blocks", "Blocks that may not move.", "pinned_blocks"),
    _gauge("reserved_blocks", "Blocks promised to admitted requests.", "reserved_blocks"),
    _counter("reservations", "Reservations granted.", "counters", "reservations"),
    _counter("reservations_refused", "Attempts to reserve without room.", "counters", "reservations_refused"),
    # Use of the cache.
    _gauge("hbm_hit_ratio", "Uses of existing blocks that were in HBM when needed.", "hbm_hit_rate"),
    _gauge("prefix_hit_ratio", "Looked-up tokens that were cached on any tier.", "prefix_hit_rate"),
    _counter("block_uses", "Uses of blocks whose KV exists on some tier.", "counters", "used_blocks"),
    _counter("block_uses_in_hbm", "Of these, in HBM when needed.", "counters", "used_in_hbm_blocks"),
    _counter("prefix_lookup_tokens", "Prompt tokens looked up.", "counters", "looked_up_tokens"),
    _counter("prefix_hit_tokens", "Prompt tokens found, by tier at arrival.", "counters", "hit_tokens_{tier}"),
    _counter("joined_tokens", "Prompt tokens computed by another request meanwhile.", "counters", "joined_tokens"),
    _counter("computed_tokens", "Tokens whose KV was computed.", "counters", "computed_tokens"),
    _counter("recomputed_tokens", "Of these, computed before.", "counters", "recomputed_tokens"),
    _counter("published_blocks", "Blocks that became shareable.", "counters", "published_blocks"),
    # Movement.
    _gauge("copies_in_flight", "Copies under way.", "copies_in_flight"),
    _gauge("cold_threshold", "Heat below which a block may be demoted, as configured.", "cold_threshold"),
    _gauge("effective_threshold", "The same as in effect: the adaptive guard may lower it.", "effective_threshold"),
    _counter("swap_in_blocks", "Blocks copied towards HBM.", "counters", "swap_in_blocks"),
    _counter("swap_in_bytes", "Bytes copied towards HBM.", "counters", "swap_in_bytes"),
    _counter("swap_out_blocks", "Blocks copied away from HBM.", "counters", "swap_out_blocks"),
    _counter("swap_out_bytes", "Bytes copied away from HBM.", "counters", "swap_out_bytes"),
    _counter("nvme_demoted_blocks", "Blocks copied from DRAM to NVMe.", "counters", "demoted_to_nvme_blocks"),
    _counter("nvme_loaded_blocks", "Blocks loaded from NVMe.", "counters", "loaded_from_nvme_blocks"),
    _counter("freed_clean_blocks", "HBM slots freed without a copy.", "counters", "freed_clean_blocks"),
    _counter("dropped_blocks", "Cached blocks given up for good.", "counters", "dropped_blocks"),
    _counter("failed_copies", "Copies that failed.", "counters", "failed_copies"),
    _counter("lost_blocks", "Blocks that could not be read or verified.", "counters", "lost_blocks"),
    # Prefetch.
    _gauge("prefetch_window_blocks", "Blocks fetched ahead.", "prefetch_window"),
    _counter("prefetch_issued_blocks", "Blocks whose prefetch was started.", "counters", "prefetch_issued_blocks"),
    _counter("prefetch_used_blocks", "Prefetched blocks that were used.", "counters", "prefetch_used_blocks"),
    _counter("prefetch_late_blocks", "Prefetches needed before they ended.", "counters", "prefetch_late_blocks"),
    _counter("prefetch_wasted_blocks", "Prefetched blocks never used.", "counters", "prefetch_wasted_blocks"),
)
"""All but ``dflash2_http_requests_total``, which has labels of its own."""


def render(stats: Mapping[str, Any], metrics: Sequence[Series] = METRICS) -> bytes:
    """The statistics in Prometheus' text format.

    Args:
        stats: nested, as ``Engine.stats()`` returns them; a server adds its own under ``server``.
        metrics: what to export.
    """
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Snapshot(stats, metrics))
    return generate_latest(registry)


class _Snapshot(Collector):
    """The metrics of one moment."""

    def __init__(self, stats: Mapping[str, Any], metrics: Sequence[Series]) -> None:
        self._stats = stats
        self._metrics = metrics

    def collect(self) -> Iterator[Metric]:
        for series in self._metrics:
            labels = ["tier"] if series.per_tier else []
            family = (CounterMetricFamily if series.kind == "counter" else GaugeMetricFamily)(
                PREFIX + series.name, series.help, labels=labels
            )
            for tier in TIERS if series.per_tier else ("",):
                keys = [key.replace("{tier}", tier) for key in series.path]
                family.add_metric([tier] if labels else [], number_at(self._stats, keys))
            yield family
        yield _http_requests(self._stats)


def _http_requests(stats: Mapping[str, Any]) -> Metric:
    family = CounterMetricFamily(
        PREFIX + "http_requests", "HTTP requests answered, by route and status.", labels=["route", "status"]
    )
    for row in stats.get("server", {}).get("http_requests", ()):
        family.add_metric([row["route"], str(row["status"])], row["count"])
    return family


def number_at(stats: Mapping[str, Any], keys: Sequence[str]) -> float:
    """The number at the end of ``keys``; 0 if the way there does not exist."""
    value: Any = stats
    for key in keys:
        value = value.get(key) if isinstance(value, Mapping) else None
    return 0.0 if value is None else float(value)
