"""DFlash2's metrics on SGLang's own ``/metrics``: the scheduler's process writes them, SGLang's server adds them up."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from typing import Any

INTERVAL_S = 2.0


class SchedulerMetrics:
    """One Prometheus metric per series that has a value here, with the rank as a label.

    SGLang collects from all its processes by files (the multi-process mode of ``prometheus_client``), which it sets up
    with ``--enable-metrics``; without it there is nothing to write to.

    Args:
        stats: ``Runtime.stats()``, to see which series exist.
        rank: of this process.
    """

    def __init__(self, stats: Mapping[str, Any], rank: int) -> None:
        self._next = 0.0
        self._writers: list[tuple[tuple[str, ...], Any, bool]] = []
        self._last: dict[int, float] = {}
        if "PROMETHEUS_MULTIPROC_DIR" in os.environ:
            self._writers = _writers(stats, rank)

    @property
    def is_due(self) -> bool:
        """It is time to write again."""
        return bool(self._writers) and time.monotonic() >= self._next

    def write(self, stats: Mapping[str, Any]) -> None:
        """Write the values of this moment."""
        from dflash2.monitoring.numbers_in import number_at

        self._next = time.monotonic() + INTERVAL_S
        for index, (path, metric, is_counter) in enumerate(self._writers):
            value = number_at(stats, path)
            if is_counter:
                metric.inc(max(0.0, value - self._last.get(index, 0.0)))
                self._last[index] = value
            else:
                metric.set(value)


def _writers(stats: Mapping[str, Any], rank: int) -> list[tuple[tuple[str, ...], Any, bool]]:
    # Imported here: prometheus_client decides at its import whether it writes to files.
    from prometheus_client import Counter, Gauge

    from dflash2.monitoring.prometheus import METRICS, PREFIX

    writers: list[tuple[tuple[str, ...], Any, bool]] = []
    for series in METRICS:
        if series.path[0] not in stats or series.kind == "histogram":
            continue
        is_counter = series.kind == "counter"
        labels = ["rank", *series.labels]
        metric: Any = (
            Counter(PREFIX + series.name, series.help, labels)
            if is_counter
            else Gauge(PREFIX + series.name, series.help, labels, multiprocess_mode="mostrecent")
        )
        for values, path in series.places():
            writers.append((path, metric.labels(str(rank), *values), is_counter))
    return writers
