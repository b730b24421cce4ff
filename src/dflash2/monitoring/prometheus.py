"""Statistics as Prometheus metrics. The names are stable: renaming one is a breaking change.

``METRICS`` says where in the nested statistics each metric is found. A series whose value is not there (a part that
is switched off) is exported as zero, so that every series exists from the first scrape on.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from typing import Any, Literal

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from dflash2.monitoring.data_path import FAILURES
from dflash2.monitoring.latency import BOUNDS_S
from dflash2.monitoring.numbers_in import TIERS, number_at

CONTENT_TYPE = CONTENT_TYPE_LATEST
PREFIX = "dflash2_"
PLACEHOLDERS: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "tier": ("tier", TIERS),
    "origin": ("origin", TIERS),
    "direction": ("direction", ("in", "out")),
    "failure": ("reason", tuple(reason.replace(" ", "_") for reason in FAILURES)),
    "wait": ("reason", ("queued", "room", "smoothed", "seats", "growth")),
    "stage": ("stage", ("validate", "tokenise")),
    "step": ("stage", ("estimate", "lookup", "reserved", "batch")),
}
"""What may stand in a path: the label that it becomes, and its values. ``direction`` is seen from HBM; ``origin`` is
where a block was, ``tier`` where it is or goes."""


@dataclass(frozen=True, slots=True)
class Series:
    """One metric and where its value is.

    Attributes:
        name: without the prefix and without ``_total``, in base units.
        kind: counters only grow, gauges do not, histograms count observations by size.
        help: one sentence.
        path: keys from the top of the statistics to the number; ``{name}`` in a key is one of ``PLACEHOLDERS``, stands
            for each of its values and makes its label one of the metric's.
    """

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    help: str
    path: tuple[str, ...]

    @property
    def labels(self) -> tuple[str, ...]:
        """Names of its labels."""
        return tuple(PLACEHOLDERS[name][0] for name in self._placeholders)

    @property
    def _placeholders(self) -> list[str]:
        return re.findall(r"\{(\w+)\}", "/".join(self.path))

    def places(self) -> Iterator[tuple[tuple[str, ...], tuple[str, ...]]]:
        """(label values, path) of each of its series."""
        for values in product(*(PLACEHOLDERS[name][1] for name in self._placeholders)):
            named = dict(zip(self._placeholders, values, strict=True))
            if named.get("origin", "") != named.get("tier"):
                yield values, tuple(key.format(**named) for key in self.path)


def _gauge(name: str, text: str, *path: str) -> Series:
    return Series(name, "gauge", text, path)


def _counter(name: str, text: str, *path: str) -> Series:
    return Series(name, "counter", text, path)


def _histogram(name: str, text: str, *path: str) -> Series:
    return Series(name, "histogram", text, path)


_STAGE = ("pipeline", "stages", "{stage}")
_STEP_STAGE = ("scheduler", "stages", "{step}")
_ROUTE = ("transfer", "routes", "{origin}_to_{tier}")

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
    # LoRA adapters and hints.
    _gauge("adapters_registered", "Adapters that requests may name.", "adapters", "registered"),
    _gauge("adapter_slots", "Adapters that fit the device.", "adapters", "slots"),
    _gauge("adapter_slots_used", "Adapters on the device.", "adapters", "slots_used"),
    _gauge("adapters_pinned", "Adapters that requests use.", "adapters", "pinned_adapters"),
    _gauge("adapter_dram_bytes", "Copies of adapters in DRAM.", "adapters", "dram_bytes"),
    _gauge("adapter_requests_waiting", "Requests whose adapter is not ready.", "adapters", "waiting_requests"),
    _counter("adapter_wait_seconds", "Time requests waited for their adapter.", "adapters", "stage", "wait_s"),
    _counter("adapter_uses", "Requests with an adapter.", "adapters", "uses"),
    _counter("adapter_uses_on_device", "Of these, how many found it on the device.", "adapters", "uses_on_device"),
    _counter("adapter_evictions", "Adapters that gave their place on the device to another.", "adapters", "evictions"),
    _counter("adapter_loads_failed", "Loads of adapters that failed.", "adapters", "failed"),
    _counter("prefetch_hints", "Prompts that clients announced.", "hints", "prefetch_hints"),
    _gauge("hint_pinned_blocks", "Blocks that clients pinned.", "hints", "pinned_blocks"),
    _counter("hint_pins_refused", "Pins for which there was no room.", "hints", "pins_refused"),
    _counter("load_timeouts", "Loads given up and computed again.", "scheduler", "load_timeouts"),
    _gauge("requests_held", "Waiting requests, by what they wait for.", "scheduler", "wait_reasons", "{wait}"),
    _counter("requests_refused", "Requests that found the queue full.", "scheduler", "refused_requests"),
    _counter("unplanned_swaps", "Requests swapped in mid-turn: HBM was short.", "scheduler", "unplanned_swaps"),
    _counter("growth_waits", "Waits of answers that outgrew their reservation.", "scheduler", "growth_waits"),
    _counter("smoothed_steps", "Steps in which a request was held back.", "scheduler", "admission", "smoothed_steps"),
    _counter("pressure_steps", "Steps in which memory was short.", "scheduler", "admission", "pressure_steps"),
    _gauge("step_stage_requests_waiting", "Requests that wait for the stage.", *_STEP_STAGE, "queued"),
    _counter("step_stage_seconds", "Time spent in a stage of the engine.", *_STEP_STAGE, "busy_s"),
    _counter("step_stage_wait_seconds", "Time requests waited for the stage.", *_STEP_STAGE, "wait_s"),
    _gauge("pipeline_stage_requests_waiting", "Requests that wait for the stage.", *_STAGE, "queued"),
    _gauge("pipeline_stage_requests", "Requests in the stage.", *_STAGE, "active"),
    _counter("pipeline_stage_seconds", "Time spent to make requests ready.", *_STAGE, "busy_s"),
    _counter("pipeline_stage_wait_seconds", "Time requests waited for the stage.", *_STAGE, "wait_s"),
    _gauge("pipeline_requests", "Requests being made ready.", "pipeline", "preparing_requests"),
    # Memory.
    _gauge("block_size_bytes", "Bytes of one block.", "block_bytes"),
    _gauge("tier_capacity_blocks", "Blocks that fit the tier.", "tiers", "{tier}", "capacity_blocks"),
    _gauge("tier_capacity_bytes", "Bytes of the blocks that fit the tier.", "tiers", "{tier}", "pool_bytes"),
    _gauge("tier_used_blocks", "Blocks that have a copy on the tier.", "tiers", "{tier}", "used_blocks"),
    _gauge("tier_retired_blocks", "Slots no longer used, after faults.", "tiers", "{tier}", "retired_blocks"),
    _gauge("pinned_blocks", "Blocks that may not move.", "pinned_blocks"),
    _gauge("reserved_blocks", "Blocks promised to admitted requests.", "reserved_blocks"),
    _counter("reservations", "Reservations granted.", "counters", "reservations"),
    _counter("reservations_refused", "Requests that found no room.", "counters", "reservations_refused"),
    # Use of the cache.
    _gauge("hbm_hit_ratio", "Uses of existing blocks that were in HBM when needed.", "hbm_hit_rate"),
    _gauge("prefix_hit_ratio", "Looked-up tokens that were cached on any tier.", "prefix_hit_rate"),
    _counter("block_uses", "Uses of blocks whose KV exists on some tier.", "counters", "used_blocks"),
    _counter("block_uses_in_hbm", "Of these, in HBM when needed.", "counters", "used_in_hbm_blocks"),
    _counter("prefix_lookup_tokens", "Prompt tokens looked up.", "counters", "looked_up_tokens"),
    _counter(
        "prefix_hit_tokens", "Of these, found cached, by the tier where they were.", "counters", "hit_tokens_{origin}"
    ),
    _counter("joined_tokens", "Prompt tokens computed by another request meanwhile.", "counters", "joined_tokens"),
    _counter("computed_tokens", "Tokens whose KV was computed.", "counters", "computed_tokens"),
    _counter("recomputed_tokens", "Of these, computed before.", "counters", "recomputed_tokens"),
    _counter("published_blocks", "Blocks that became shareable.", "counters", "published_blocks"),
    # Movement.
    _gauge("copies_in_flight", "Copies under way.", "copies_in_flight"),
    _gauge("cold_threshold", "Heat below which a block may be demoted, as configured.", "cold_threshold"),
    _gauge("effective_threshold", "The same as in effect: the adaptive guard may lower it.", "effective_threshold"),
    _counter("swap_blocks", "Blocks copied to (in) and from (out) HBM.", "counters", "swap_{direction}_blocks"),
    _counter("swap_bytes", "Bytes copied to (in) and from (out) HBM.", "counters", "swap_{direction}_bytes"),
    _counter("nvme_demoted_blocks", "Blocks copied to NVMe.", "counters", "demoted_to_nvme_blocks"),
    _counter("nvme_loaded_blocks", "Blocks loaded from NVMe.", "counters", "loaded_from_nvme_blocks"),
    _counter("demoted_ahead_blocks", "Blocks demoted ahead of need.", "regret", "demoted_blocks"),
    _counter("regretted_blocks", "Of these, needed again within the horizon.", "regret", "regretted_blocks"),
    _counter("freed_clean_blocks", "HBM slots freed without a copy.", "counters", "freed_clean_blocks"),
    _counter("dropped_blocks", "Cached blocks given up for good.", "counters", "dropped_blocks"),
    _counter("failed_copies", "Copies that failed.", "counters", "failed_copies"),
    _counter("lost_blocks", "Blocks that could not be read or verified.", "counters", "lost_blocks"),
    # The data path.
    _counter("copy_jobs", "Copies ended, by route.", *_ROUTE, "jobs"),
    _counter("copied_blocks", "Blocks that arrived, by route.", *_ROUTE, "blocks"),
    _counter("copied_bytes", "Bytes that arrived, by route.", *_ROUTE, "bytes"),
    _counter("copy_busy_seconds", "Time in which batches moved, summed over batches.", *_ROUTE, "busy_s"),
    _counter("copy_latency_seconds", "Submission to end, summed over copies.", *_ROUTE, "latency_sum_s"),
    _gauge("copy_queue_blocks", "Blocks submitted that have not ended.", *_ROUTE, "queued_blocks"),
    _counter("copy_failed_blocks", "Blocks that did not arrive.", "transfer", "failures", "{failure}"),
    _gauge("staging_bytes", "Memory of the staging buffer.", "transfer", "staging_bytes"),
    _gauge("staging_used_bytes", "Of it, in use.", "transfer", "staging_in_use_bytes"),
    _gauge("staging_peak_bytes", "Of it, most ever in use at once.", "transfer", "staging_peak_bytes"),
    # Devices and host.
    _gauge("nvme_healthy", "1 while NVMe takes new blocks.", "nvme", "healthy"),
    _gauge("nvme_slow", "1 while NVMe takes stores much slower than it can.", "transfer", "pressed"),
    _counter("nvme_checksum_failures", "Loads that were not what was stored.", "nvme", "checksum_failures"),
    _gauge("nvme_quarantined_slots", "Slots that failed and are not used again.", "nvme", "quarantined_slots"),
    _gauge("nvme_disk_free_bytes", "Free on the file system of the NVMe files.", "disk", "free_bytes"),
    _gauge("nvme_disk_bytes", "Size of that file system.", "disk", "total_bytes"),
    _gauge("nvme_temperature_celsius", "As the disk says.", "disk", "smart", "temperature_celsius"),
    _gauge("nvme_wear_ratio", "Share of the rated writes used, as the disk says.", "disk", "smart", "wear_ratio"),
    _gauge("nvme_critical_warning", "Not 0 if the disk warns of itself.", "disk", "smart", "critical_warning"),
    _gauge("host_memory_limit_bytes", "What this process may use.", "host", "memory_limit_bytes"),
    _gauge("host_memory_headroom_bytes", "Of it, what is left.", "host", "headroom_bytes"),
    # Latency of requests.
    _histogram("queue_seconds", "Arrival to the first step.", "latency", "queue"),
    _histogram("time_to_first_token_seconds", "Arrival to the first token.", "latency", "ttft"),
    _histogram("time_per_output_token_seconds", "Mean time between tokens.", "latency", "tpot"),
    # Prefetch.
    _gauge("prefetch_window_blocks", "Blocks fetched ahead.", "prefetch_window"),
    _counter("prefetch_issued_blocks", "Blocks whose prefetch was started.", "counters", "prefetch_issued_blocks"),
    _counter("prefetch_used_blocks", "Prefetched blocks that were used.", "counters", "prefetch_used_blocks"),
    _counter("prefetch_late_blocks", "Prefetches needed before they ended.", "counters", "prefetch_late_blocks"),
    _counter("prefetch_wasted_blocks", "Prefetched blocks never used.", "counters", "prefetch_wasted_blocks"),
)
"""All but ``dflash2_http_requests_total``, which has labels of its own."""


def render(stats: Mapping[str, Any]) -> bytes:
    """The statistics in Prometheus' text format.

    Args:
        stats: nested, as ``Engine.stats()`` returns them; a server adds its own under ``server``.
    """
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Snapshot(stats))
    return generate_latest(registry)


class _Snapshot(Collector):
    """The metrics of one moment."""

    def __init__(self, stats: Mapping[str, Any]) -> None:
        self._stats = stats

    def collect(self) -> Iterator[Metric]:
        for series in METRICS:
            yield _family(series, self._stats)
        yield _http_requests(self._stats)


def _family(series: Series, stats: Mapping[str, Any]) -> Metric:
    name, labels = PREFIX + series.name, series.labels
    if series.kind == "histogram":
        histogram = HistogramMetricFamily(name, series.help)
        buckets = [(f"{bound:g}", number_at(stats, (*series.path, f"le_{bound:g}"))) for bound in BOUNDS_S]
        count = number_at(stats, (*series.path, "count"))
        histogram.add_metric([], [*buckets, ("+Inf", count)], number_at(stats, (*series.path, "sum_s")))
        return histogram
    family = (CounterMetricFamily if series.kind == "counter" else GaugeMetricFamily)(name, series.help, labels=labels)
    for values, path in series.places():
        family.add_metric(values, number_at(stats, path))
    return family


def _http_requests(stats: Mapping[str, Any]) -> Metric:
    family = CounterMetricFamily(
        PREFIX + "http_requests", "HTTP requests answered, by route and status.", labels=["route", "status"]
    )
    for row in stats.get("server", {}).get("http_requests", ()):
        family.add_metric([row["route"], str(row["status"])], row["count"])
    return family
