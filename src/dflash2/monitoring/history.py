"""The history behind the curves: three resolutions in fixed memory, kept across restarts."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from dflash2.monitoring.curves import CURVES, CurveReader
from dflash2.monitoring.history_file import read_history, write_history
from dflash2.types import FloatArray

logger = logging.getLogger(__name__)

NAMES = tuple(curve.name for curve in CURVES)
SPANS: Mapping[str, tuple[int, int]] = {"10m": (1, 600), "3h": (10, 1080), "3d": (60, 4320)}
"""By name: seconds between two points, and number of points."""
SAVE_INTERVAL_S = 60.0
CLOSE_WAIT_S = 5.0
"""Longest wait at the end for a save that is under way."""


class Ring:
    """The newest points of one resolution. A point is the mean of what was put in within its seconds.

    Args:
        resolution_s: seconds between two points.
        num_points: how many are kept.
    """

    def __init__(self, resolution_s: int, num_points: int) -> None:
        self.resolution_s = resolution_s
        self.ticks = np.zeros(num_points, np.int64)
        """Time of each point in units of the resolution; 0 where there is none."""
        self.values = np.full((num_points, len(NAMES)), np.nan, np.float32)
        self._sums = np.zeros(len(NAMES))
        self._counts = np.zeros(len(NAMES))

    def put(self, now: float, row: FloatArray) -> None:
        """Add a row, float32 ``[curves]`` with NaN for nothing, at a time in seconds since 1970."""
        tick = int(now // self.resolution_s)
        at = tick % len(self.ticks)
        if self.ticks[at] != tick:
            self.ticks[at] = tick
            self._sums[:] = 0.0
            self._counts[:] = 0.0
        there = ~np.isnan(row)
        self._sums[there] += row[there]
        self._counts += there
        with np.errstate(invalid="ignore"):
            self.values[at] = self._sums / self._counts

    def points(self, now: float) -> tuple[np.ndarray, FloatArray]:
        """(seconds since 1970 int64 ``[n]``, float32 ``[n, curves]``) of the span that ends now, oldest first."""
        tick = int(now // self.resolution_s)
        kept = np.flatnonzero((self.ticks > tick - len(self.ticks)) & (self.ticks <= tick))
        kept = kept[np.argsort(self.ticks[kept])]
        return self.ticks[kept] * self.resolution_s, self.values[kept]


class History:
    """Samples the statistics once a second.

    One thread calls ``step``; others may read at any time and see at worst one point half written.

    Args:
        path: where the history is kept; None: not at all.
        wall: seconds since 1970.
    """

    def __init__(self, path: Path | None = None, wall: Callable[[], float] = time.time) -> None:
        self._path = path
        self._wall = wall
        self._reader = CurveReader()
        self._rings = {span: Ring(*shape) for span, shape in SPANS.items()}
        self._next_sample = 0.0
        self._next_save = wall() + SAVE_INTERVAL_S
        self._saving: threading.Thread | None = None
        if path is not None:
            read_history(path, NAMES, self._rings.values())

    @property
    def num_bytes(self) -> int:
        """Memory held; it never grows."""
        return sum(ring.ticks.nbytes + ring.values.nbytes for ring in self._rings.values())

    def step(self, stats: Callable[[], Mapping[str, Any]]) -> None:
        """Take a sample if a second has passed; save if a minute has."""
        now = self._wall()
        if self._next_sample - 1.0 <= now < self._next_sample:
            return  # a clock that was set back is no reason to wait
        self._next_sample = float(int(now) + 1)
        row = self._reader.row(stats(), now)
        for ring in self._rings.values():
            ring.put(now, row)
        if now >= self._next_save:
            self._next_save = now + SAVE_INTERVAL_S
            self._save_aside()

    def curves(self, span: str) -> dict[str, Any]:
        """Points of a span of ``SPANS`` as JSON: ``times`` and, by name, ``series``; None where there is no value."""
        ring = self._rings[span]
        times, values = ring.points(self._wall())
        columns = zip(NAMES, values.T.astype(float), strict=True)
        series = {name: [None if np.isnan(value) else value for value in column] for name, column in columns}
        return {"resolution_s": ring.resolution_s, "times": times.tolist(), "series": series}

    def csv(self, span: str) -> Iterator[str]:
        """The same as lines of a CSV file, with a header."""
        yield ",".join(("time", *NAMES)) + "\n"
        times, values = self._rings[span].points(self._wall())
        for at, row in zip(times.tolist(), values.tolist(), strict=True):
            yield ",".join([str(at), *("" if value != value else f"{value:.7g}" for value in row)]) + "\n"

    def close(self) -> None:
        """Save what there is, unless an earlier save hangs in the disk. Idempotent."""
        if self._saving is not None:
            self._saving.join(CLOSE_WAIT_S)
            if self._saving.is_alive():  # it writes the same file
                logger.warning("the history is not saved: an earlier save to %s hangs in the disk", self._path)
                return
        self._save()

    def _save_aside(self) -> None:
        """In a thread: the disk may be slow. One that still hangs is not joined by another."""
        if self._path is not None and (self._saving is None or not self._saving.is_alive()):
            self._saving = threading.Thread(target=self._save, name="dflash2-history", daemon=True)
            self._saving.start()

    def _save(self) -> None:
        if self._path is None:
            return
        try:
            write_history(self._path, NAMES, self._rings.values())
        except OSError as error:
            logger.warning("the history cannot be written to %s: %s; it is kept in memory", self._path, error)
