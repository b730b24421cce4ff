from __future__ import annotations

import re

import pytest
from prometheus_client.parser import text_string_to_metric_families
from tests.fakes.engine_world import EngineWorld

from dflash2.monitoring.counters import CacheCounters
from dflash2.monitoring.latency import BOUNDS_S, Histogram
from dflash2.monitoring.prometheus import METRICS, PLACEHOLDERS, render


def series(stats: dict) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    families = text_string_to_metric_families(render(stats).decode())
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in families
        for sample in family.samples
    }


def test_every_series_exists_before_anything_happened() -> None:
    empty = series({})
    assert set(empty.values()) == {0.0}
    assert len(empty) == sum(
        len(BOUNDS_S) + 3 if metric.kind == "histogram" else len(list(metric.places())) for metric in METRICS
    )
    assert set(empty) == set(series({"counters": {"swap_in_blocks": 5}}))


def test_values_come_from_their_place() -> None:
    stats = {
        "enabled": True,
        "hbm_hit_rate": 0.98,
        "tiers": {"nvme": {"pool_bytes": 2**45}},
        "counters": {"swap_in_blocks": 7, "hit_tokens_dram": 9},
        "scheduler": {"waiting_requests": 3},
        "server": {"engine_up": True, "http_requests": [{"route": "/health", "status": 200, "count": 4}]},
    }
    found = series(stats)
    expected = {
        ("dflash2_enabled", ()): 1,
        ("dflash2_engine_up", ()): 1,
        ("dflash2_hbm_hit_ratio", ()): 0.98,
        ("dflash2_tier_capacity_bytes", (("tier", "nvme"),)): 2**45,
        ("dflash2_tier_capacity_bytes", (("tier", "hbm"),)): 0,
        ("dflash2_swap_blocks_total", (("direction", "in"),)): 7,
        ("dflash2_prefix_hit_tokens_total", (("origin", "dram"),)): 9,
        ("dflash2_requests_waiting", ()): 3,
        ("dflash2_http_requests_total", (("route", "/health"), ("status", "200"))): 4,
    }
    assert {key: found[key] for key in expected} == expected


def test_every_counter_of_the_cache_is_exported_once() -> None:
    counted = [name for name, _ in CacheCounters().flat()]
    exported = [path[1] for metric in METRICS if metric.path[0] == "counters" for _, path in metric.places()]
    assert sorted(exported) == sorted(counted)


@pytest.mark.parametrize("metric", METRICS, ids=lambda metric: metric.name)
def test_names_follow_the_conventions(metric) -> None:
    assert re.fullmatch(r"[a-z][a-z0-9_]*", metric.name)
    assert not metric.name.endswith(("_total", "_mb", "_ms", "_percent", "_rate"))
    assert metric.help.endswith(".")


def test_labels_are_those_of_the_conventions() -> None:
    labels = {label for metric in METRICS for label in metric.labels}
    assert labels == {label for label, _ in PLACEHOLDERS.values()} == {"tier", "origin", "direction", "reason", "stage"}


def test_every_figure_of_the_engine_has_its_place() -> None:
    """What the engine counts is exported, and what is exported under its name is counted."""
    world = EngineWorld((16, 16, 32))
    world.add_random(4)
    world.run(500)
    stats = world.engine.stats()
    for metric in METRICS:
        if metric.path[0] in stats and metric.path[0] not in ("nvme", "allocator") and metric.kind != "histogram":
            for _, path in metric.places():
                place = stats
                for key in path:
                    assert key in place, f"{metric.name}: {path}"
                    place = place[key]


def test_routes_have_an_origin_and_a_tier() -> None:
    found = series({"transfer": {"routes": {"dram_to_hbm": {"blocks": 5}}, "failures": {"staging_timeout": 2}}})
    copied = {
        dict(labels)["origin"]: value for (name, labels), value in found.items() if "copied_blocks" in name and value
    }
    assert copied == {"dram": 5}
    assert ("dflash2_copied_blocks_total", (("origin", "hbm"), ("tier", "hbm"))) not in found
    assert found["dflash2_copy_failed_blocks_total", (("reason", "staging_timeout"),)] == 2


def test_a_histogram_is_cumulative() -> None:
    queue = Histogram()
    for seconds in (0.004, 0.005, 0.3, 1e6):
        queue.observe(seconds)
    found = series({"latency": {"queue": queue.as_dict()}})
    buckets = {
        dict(labels)["le"]: value for (name, labels), value in found.items() if name == "dflash2_queue_seconds_bucket"
    }
    assert (buckets["0.005"], buckets["0.2"], buckets["0.5"], buckets["100"], buckets["+Inf"]) == (2, 2, 3, 3, 4)
    assert found["dflash2_queue_seconds_count", ()] == 4
    assert found["dflash2_queue_seconds_sum", ()] == pytest.approx(1e6 + 0.309)


def test_names_are_unique() -> None:
    assert len({metric.name for metric in METRICS}) == len(METRICS)


def test_a_renamed_metric_breaks_dashboards() -> None:
    """A change here is a breaking change and belongs in the changelog."""
    names = {metric.name + ("_total" if metric.kind == "counter" else "") for metric in METRICS}
    assert names >= {
        "engine_up",
        "enabled",
        "tier_capacity_blocks",
        "tier_capacity_bytes",
        "tier_used_blocks",
        "hbm_hit_ratio",
        "prefix_hit_ratio",
        "swap_blocks_total",
        "swap_bytes_total",
        "copied_blocks_total",
        "copy_failed_blocks_total",
        "time_to_first_token_seconds",
        "prefetch_used_blocks_total",
        "prefetch_late_blocks_total",
        "prefetch_wasted_blocks_total",
        "requests_waiting",
        "requests_admitted_total",
        "requests_timed_out_total",
        "computed_tokens_total",
        "recomputed_tokens_total",
    }
