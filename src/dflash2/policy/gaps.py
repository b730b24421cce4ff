"""One kind of wait (how long until a session comes back), learned from the last few thousand of its sort.

Where it is known how a request ended, the wait is predicted first (least squares of the log gap) and the hazard is a
function of time over prediction. Where it is not, a prediction would mostly scale noise: the hazard is a function of
plain time, and the features sort the waits by risk (Poisson regression) into eight classes of equal size.
"""

from __future__ import annotations

import bisect
import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from dflash2.policy.arrays import Floats, Ints
from dflash2.policy.hazard import (
    RADIX,
    HazardTables,
    assumed_hazard,
    bin_at,
    bin_of,
    build_tables,
    edges,
    tables_from,
)
from dflash2.policy.trust import PredictionTrust

NUM_FEATURES = 17
NUM_SIZE_CLASSES = 3
"""Output, new and all prompt tokens."""
WINDOW = 6000
"""Waits remembered."""
WINDOW_SAVED = 1000
"""Of them, those that survive a restart."""
MAX_ROWS = 1024
"""Classes with a table of their own."""
SHORTEST_S = 1e-3
PIECE = 1024
FEWEST_FOR_SCALE = 5
FEWEST_FOR_RISK = 10
RIDGE = 1.0
RIDGE_RISK = 3.0
LOG_SCALE_BOUNDS = (-3.0, 12.0)
LOG_RISK_BOUNDS = (-6.0, 4.0)
NUM_RISK_CLASSES = 8
LOW_SCALED = -6.0
"""Where the first bin begins: log of time over prediction."""
LOW_PLAIN = math.log(0.05)


@dataclass(slots=True)
class Wait:
    """Handle of a wait that goes on.

    Attributes:
        slot: where in the window it is, unless newer ones have taken its place.
        serial: tells that.
        by_history, by_size: rows of the tables when it began.
        log_scale: predicted when it began.
    """

    slot: int
    serial: int
    by_history: int
    by_size: int
    log_scale: float


class GapModel:
    """Learns one kind of wait.

    Args:
        scaled: predict each wait's length and work in time over prediction.
        num_classes: classes by history; those by size follow them in what ``begin`` is given.
    """

    def __init__(self, scaled: bool, num_classes: int) -> None:
        self.scaled = scaled
        self.low = LOW_SCALED if scaled else LOW_PLAIN
        self._features = np.zeros((WINDOW, NUM_FEATURES))
        self._classes = np.zeros((WINDOW, num_classes + NUM_SIZE_CLASSES), np.int64)
        self._start = np.zeros(WINDOW)
        self._age = np.zeros(WINDOW)
        self._ended = np.zeros(WINDOW, np.bool_)
        self._going_on = np.zeros(WINDOW, np.bool_)
        self._serial = np.zeros(WINDOW, np.int64)
        self._owner = np.zeros(WINDOW, np.int64)
        self.num_begun = 0
        self._weights: Floats | None = None
        self.mean_log = 3.0 if scaled else 0.0
        """Log scale of a wait nothing is known about."""
        self._risk = np.zeros(NUM_FEATURES)
        self._risk_cuts: list[float] = []
        prior = assumed_hazard(self.low, 0.8, 1.0, 1.0) if scaled else assumed_hazard(self.low, 0.5, 60.0, 1.5)
        self._prior = prior
        self.by_history: HazardTables = tables_from(prior[None, :], self.low, {})
        self.by_size: HazardTables = self.by_history
        """Two trees over the same waits; the mean of both errs less than either."""
        self._by_age: HazardTables = self.by_history
        """All waits alike, on one scale: what the predictions must be better than."""
        self._placed = np.zeros((2, WINDOW), np.int64)
        self._log_scale = np.zeros(WINDOW)
        self.trust = PredictionTrust()

    # -- waits ---------------------------------------------------------------------------------------------------

    def begin(self, features: list[float], classes: tuple[int, ...], owner: int, now: float) -> Wait:
        """A wait begins.

        Args:
            features: ``NUM_FEATURES`` values, the first is 1.
            classes: two paths in trees of classes, by history and by size, each in ``[0, RADIX)``.
            owner: row that ``refit`` reports.
            now: seconds.
        """
        slot = self.num_begun % WINDOW
        row = self._features[slot]
        row[:] = features
        self._classes[slot] = classes
        self._start[slot] = now
        self._ended[slot] = False
        self._going_on[slot] = True
        self._owner[slot] = owner
        self.num_begun += 1
        self._serial[slot] = self.num_begun
        by_history, by_size, log_scale = self.place(row, classes)
        self._placed[0, slot], self._placed[1, slot], self._log_scale[slot] = by_history, by_size, log_scale
        return Wait(slot, self.num_begun, by_history, by_size, log_scale)

    def end(self, wait: Wait, now: float, *, came_back: bool) -> None:
        """A wait is over: the session came back, or will not be watched any longer."""
        if self._serial[wait.slot] == wait.serial:
            self._age[wait.slot] = max(now - self._start[wait.slot], SHORTEST_S)
            self._ended[wait.slot] = came_back
            self._going_on[wait.slot] = False
            if came_back and self.trust.holds:
                self._judge(wait.slot)

    def place(self, features: Floats, classes: tuple[int, ...]) -> tuple[int, int, float]:
        """Of a wait that begins now: rows of the tables by history and by size, log scale."""
        log_scale = self.mean_log
        if not self.trust.holds:
            return 0, 0, log_scale
        if self._weights is not None:
            log_scale = _bounded(float(self._weights @ features), LOG_SCALE_BOUNDS)
        history, size = classes[:-NUM_SIZE_CLASSES], classes[-NUM_SIZE_CLASSES:]
        by_size = self.by_size.row_of(size)
        if self.scaled:
            return self.by_history.row_of(history), by_size, log_scale
        score = _bounded(float(self._risk @ features), LOG_RISK_BOUNDS)
        risk_class = bisect.bisect_left(self._risk_cuts, score)
        return self.by_history.row_of((risk_class // 2, risk_class, *history)), by_size, log_scale

    # -- restarts ------------------------------------------------------------------------------------------------

    def state(self, now: float) -> list[list[float]]:
        """The latest waits, one a row: features, classes, age and whether the session came back."""
        last = self.num_begun
        slots = np.arange(max(0, last - WINDOW_SAVED), last) % WINDOW
        age = np.where(self._going_on[slots], now - self._start[slots], self._age[slots])
        columns = (self._features[slots], self._classes[slots], age[:, None], self._ended[slots, None])
        rows: list[list[float]] = np.round(np.concatenate(columns, axis=1), 4).tolist()
        return rows

    def restore(self, rows: list[list[float]]) -> None:
        """Take over what ``state`` returned, as waits that are over.

        Raises:
            ValueError: the rows are of another shape.
        """
        values = np.array(rows, np.float64).reshape(-1, NUM_FEATURES + self._classes.shape[1] + 2)
        if not np.isfinite(values).all():
            raise ValueError("a figure is not finite")
        for row in values[-WINDOW_SAVED:].tolist():
            classes = tuple(int(value) % RADIX for value in row[NUM_FEATURES:-2])
            wait = self.begin(row[:NUM_FEATURES], classes, 0, 0.0)
            self.end(wait, row[-2], came_back=row[-1] > 0.5)

    # -- learning ------------------------------------------------------------------------------------------------

    def refit(self, now: float) -> tuple[Ints, Ints, Ints, Floats]:
        """Learn from the window as it is.

        Returns:
            Of the waits that go on: owner, rows of the tables by history and by size, log scale.
        """
        used = slice(0, min(self.num_begun, WINDOW))
        features, ended, going_on = self._features[used], self._ended[used], self._going_on[used]
        age = np.maximum(np.where(going_on, now - self._start[used], self._age[used]), SHORTEST_S)
        log_age = np.log(age)
        if self.scaled:
            self._fit_scale(features[ended], log_age[ended])
        if not self.trust.holds:
            self.trust.wait(self.num_begun)
        log_scale = self._log_scales(features)
        bins = bin_of(log_age - log_scale, self.low)
        paths, sizes = self._classes[used, :-NUM_SIZE_CLASSES], self._classes[used, -NUM_SIZE_CLASSES:]
        if not self.trust.holds:
            paths, sizes = paths[:, :0], sizes[:, :0]
        elif not self.scaled:
            classes = self._fit_risk(features, bins, ended)
            paths = np.concatenate([classes[:, None] // 2, classes[:, None], paths], axis=1)
        self.by_history, history = build_tables(paths, bins, ended, self._prior, self.low, MAX_ROWS)
        self.by_size, size = build_tables(sizes, bins, ended, self._prior, self.low, MAX_ROWS)
        self._by_age = self.by_history
        if self.scaled:
            alike = bin_of(log_age - self.mean_log, self.low)
            self._by_age, _ = build_tables(paths[:, :0], alike, ended, self._prior, self.low, 1)
        self._placed[0, used], self._placed[1, used], self._log_scale[used] = history, size, log_scale
        return self._owner[used][going_on], history[going_on], size[going_on], log_scale[going_on]

    def _judge(self, slot: int) -> None:
        """A wait has ended: had the predictions said so rather than its age alone?"""
        log_age = math.log(self._age.item(slot))
        at = bin_at(log_age - self._log_scale.item(slot), self.low)
        history, size = self._placed[:, slot].tolist()
        predicted = 0.5 * (self.by_history.chance(history, at) + self.by_size.chance(size, at))
        by_age = self._by_age.chance(0, bin_at(log_age - self.mean_log, self.low))
        self.trust.note(math.log(predicted / by_age), self.num_begun)

    def _fit_scale(self, features: Floats, log_gap: Floats) -> None:
        if len(log_gap):
            self.mean_log = float(log_gap.mean())
        if len(log_gap) < FEWEST_FOR_SCALE:
            return
        ridge = np.full(NUM_FEATURES, RIDGE)
        ridge[0] = 1e-3
        moments = _moments(features, np.ones(len(features))) + np.diag(ridge)
        self._weights = np.asarray(np.linalg.solve(moments, _sum_of(features, log_gap)), np.float64)

    def _log_scales(self, features: Floats) -> Floats:
        if self._weights is None or not self.trust.holds:
            return np.full(len(features), self.mean_log)
        scales: Floats = np.clip(_times(features, self._weights), *LOG_SCALE_BOUNDS)
        return scales

    def _fit_risk(self, features: Floats, bins: Ints, ended: npt.NDArray[np.bool_]) -> Ints:
        """Two Newton steps from the last fit; class of each wait by its risk."""
        if np.count_nonzero(ended) < FEWEST_FOR_RISK:
            return np.zeros(len(bins), np.int64)
        exposure = _baseline_exposure(bins, ended)
        for _ in range(2):
            expected = exposure * np.exp(np.clip(_times(features, self._risk), *LOG_RISK_BOUNDS))
            gradient = _sum_of(features, ended - expected) - RIDGE_RISK * self._risk
            curvature = _moments(features, expected) + RIDGE_RISK * np.eye(NUM_FEATURES)
            self._risk += np.clip(np.linalg.solve(curvature, gradient), -1.0, 1.0)
        score = np.clip(_times(features, self._risk), *LOG_RISK_BOUNDS)
        shares = np.arange(1, NUM_RISK_CLASSES) / NUM_RISK_CLASSES
        cuts = np.quantile(score, shares)
        self._risk_cuts = cuts.tolist()
        return np.searchsorted(cuts, score)


def _bounded(value: float, bounds: tuple[float, float]) -> float:
    return min(bounds[1], max(bounds[0], value))


def _pieces(count: int) -> list[slice]:
    """Rows in pieces so small that BLAS does not call other threads, which would wait for busy cores."""
    return [slice(start, start + PIECE) for start in range(0, count, PIECE)]


def _times(features: Floats, weights: Floats) -> Floats:
    return np.concatenate([features[piece] @ weights for piece in _pieces(len(features))])


def _sum_of(features: Floats, values: Floats) -> Floats:
    total: Floats = np.sum([values[piece] @ features[piece] for piece in _pieces(len(features))], axis=0)
    return total


def _moments(features: Floats, weights: Floats) -> Floats:
    """Sum over the rows of ``weight * outer(row, row)``."""
    parts = [(features[piece] * weights[piece, None]).T @ features[piece] for piece in _pieces(len(features))]
    total: Floats = np.sum(parts, axis=0)
    return total


def _baseline_exposure(bins: Ints, ended: npt.NDArray[np.bool_]) -> Floats:
    """Cumulative hazard, all waits alike, up to where each has come."""
    num_bins = len(edges(0.0)) - 1
    ends = np.bincount(bins, ended, num_bins)
    every = np.bincount(bins, minlength=num_bins)
    at_risk = np.cumsum(every[::-1])[::-1] - 0.5 * every
    hazard = np.divide(ends, at_risk, out=np.zeros(num_bins), where=at_risk > 0)
    cumulative = np.concatenate([[0.0], np.cumsum(hazard)])
    exposure: Floats = np.where(ended, cumulative[bins + 1], 0.5 * (cumulative[bins] + cumulative[bins + 1]))
    return exposure
