"""What the history keeps: each curve, its unit, and how it is read from the statistics."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from dflash2.monitoring.numbers_in import TIERS, number_at
from dflash2.types import FloatArray


@dataclass(frozen=True, slots=True)
class Curve:
    """One curve.

    Attributes:
        name: stable; the column of the CSV file.
        kind: ``level`` is the number itself, ``rate`` its growth per second, ``share`` its growth over that of ``of``.
        path: keys from the top of the statistics to the number.
        of: for a share, the way to what it is a share of.
    """

    name: str
    kind: Literal["level", "rate", "share"]
    path: tuple[str, ...]
    of: tuple[str, ...] = ()


def _level(name: str, *path: str) -> Curve:
    return Curve(name, "level", path)


def _rate(name: str, *path: str) -> Curve:
    return Curve(name, "rate", path)


def _counted_share(name: str, part: str, whole: str) -> Curve:
    return Curve(name, "share", ("counters", part), ("counters", whole))


def _latency(name: str, copies: str) -> Curve:
    return Curve(name, "share", ("transfer", copies, "latency_sum_s"), ("transfer", copies, "jobs"))


CURVES: tuple[Curve, ...] = (
    *(_level(f"{tier}_used_blocks", "tiers", tier, "used_blocks") for tier in TIERS),
    _level("pinned_blocks", "pinned_blocks"),
    _level("reserved_blocks", "reserved_blocks"),
    _level("requests_waiting", "scheduler", "waiting_requests"),
    _level("requests_paused", "scheduler", "paused_requests"),
    _level("requests_resident", "scheduler", "resident_requests"),
    _level("staging_used_bytes", "transfer", "staging_in_use_bytes"),
    _level("host_memory_headroom_bytes", "host", "headroom_bytes"),
    _level("effective_threshold", "effective_threshold"),
    _level("prefetch_window_blocks", "prefetch_window"),
    _rate("swap_in_bytes_per_s", "counters", "swap_in_bytes"),
    _rate("swap_out_bytes_per_s", "counters", "swap_out_bytes"),
    _rate("nvme_loaded_blocks_per_s", "counters", "loaded_from_nvme_blocks"),
    _rate("nvme_demoted_blocks_per_s", "counters", "demoted_to_nvme_blocks"),
    _rate("computed_tokens_per_s", "counters", "computed_tokens"),
    _rate("recomputed_tokens_per_s", "counters", "recomputed_tokens"),
    _rate("prefetch_used_blocks_per_s", "counters", "prefetch_used_blocks"),
    _rate("prefetch_late_blocks_per_s", "counters", "prefetch_late_blocks"),
    _rate("prefetch_wasted_blocks_per_s", "counters", "prefetch_wasted_blocks"),
    _rate("failed_copies_per_s", "counters", "failed_copies"),
    _counted_share("hbm_hit_ratio", "used_in_hbm_blocks", "used_blocks"),
    *(_counted_share(f"prefix_hit_{tier}_ratio", f"hit_tokens_{tier}", "looked_up_tokens") for tier in TIERS),
    _latency("nvme_load_seconds", "nvme_loads"),
    _latency("nvme_store_seconds", "nvme_stores"),
)
"""A curve is known by its name: others may be added, and what was kept under a name that is gone is dropped."""


class CurveReader:
    """Turns statistics into one row of values, a column for each of ``CURVES``."""

    def __init__(self) -> None:
        self._before: tuple[float, list[float], list[float]] | None = None

    def row(self, stats: Mapping[str, Any], now: float) -> FloatArray:
        """float32 ``[curves]``; NaN where a rate or a share has no meaning yet.

        Args:
            stats: as ``Runtime.stats`` returns them.
            now: seconds, later than at the last call; otherwise rates start anew.
        """
        parts = [number_at(stats, curve.path) for curve in CURVES]
        wholes = [number_at(stats, curve.of) if curve.of else 0.0 for curve in CURVES]
        values = [part if curve.kind == "level" else np.nan for curve, part in zip(CURVES, parts, strict=True)]
        if self._before is not None and now > self._before[0]:
            then, old_parts, old_wholes = self._before
            for at, curve in enumerate(CURVES):
                grown = parts[at] - old_parts[at]
                if curve.kind == "rate":
                    values[at] = grown / (now - then)
                elif curve.kind == "share" and wholes[at] > old_wholes[at]:
                    values[at] = grown / (wholes[at] - old_wholes[at])
        self._before = (now, parts, wholes)
        return np.array(values, np.float32)
