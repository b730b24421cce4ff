"""What is expected of each session at this moment: value of a place and probability of a use, for whole arrays."""

from __future__ import annotations

import math

import numpy as np

from dflash2.policy.arrays import Floats, Ints
from dflash2.policy.gaps import MAX_ROWS, SHORTEST_S, GapModel
from dflash2.policy.hazard import BIN_WIDTH, NUM_BINS, HazardTables, bin_at


class Outlook:
    """Tables of all models side by side, and for each session the table, the scale and the time it goes by.

    Args:
        models: of the sessions' waits.
        num_sessions: rows.
        touch_low: where the bins of the table for shared blocks begin; it has a region of its own behind the models'.
    """

    def __init__(self, models: list[GapModel], num_sessions: int, touch_low: float) -> None:
        regions = 2 * len(models) + 1
        self._models = models
        self._index = np.zeros((regions * MAX_ROWS, NUM_BINS), np.float32)
        self._log_survival = np.zeros((regions * MAX_ROWS, NUM_BINS + 1), np.float32)
        self._touch_base = self._paused_row = 2 * len(models) * MAX_ROWS
        self._touch_low = touch_low
        self._lows = np.array([model.low for model in models])
        self._model = np.zeros(num_sessions, np.int16)
        self._row = np.zeros((2, num_sessions), np.int64)
        """By history and by size."""
        self._log_scale = np.zeros(num_sessions)
        self._start = np.zeros(num_sessions)
        for number, model in enumerate(models):
            self._store(number, model)

    def set_session(
        self, session: int, model: int, by_history: int, by_size: int, log_scale: float, start_s: float
    ) -> None:
        """A wait of a session begins: it goes by these rows of the model's tables from ``start_s`` on."""
        self._model[session] = model
        first = 2 * model * MAX_ROWS
        self._row[0, session] = first + by_history
        self._row[1, session] = first + MAX_ROWS + by_size
        self._log_scale[session] = log_scale
        self._start[session] = start_s

    def replace(self, model: int, owners: Ints, by_history: Ints, by_size: Ints, log_scales: Floats) -> None:
        """A model has learned: where in its new tables each of its sessions stands now.

        Sessions of the model that it has forgotten go by all classes together.
        """
        self._store(model, self._models[model])
        members = np.flatnonzero(self._model == model)
        bases = self._bases(model)
        self._row[:, members] = bases[:, None]
        current = self._model[owners] == model
        for way, rows in enumerate((by_history, by_size)):
            self._row[way, owners[current]] = bases[way] + rows[current]
        self._log_scale[owners[current]] = log_scales[current]

    def replace_touch(self, shared: HazardTables, paused: HazardTables) -> None:
        """The same for blocks that no session's return decides about: shared ones, and those of paused requests."""
        self._put(self._touch_base, shared)
        self._paused_row = self._touch_base + len(shared.index)
        self._put(self._paused_row, paused)

    def paused_value(self, touched_s: Floats, now: float) -> Floats:
        """As ``session_value``, for blocks of paused requests, given when each was used last."""
        at, _ = self._touch_position(touched_s, now)
        value: Floats = self._index[self._paused_row, at.astype(np.int64)].astype(np.float64)
        return value

    def paused_chance(self, touched_s: Floats, now: float, horizon_s: float) -> Floats:
        """As ``session_chance``, for the same."""
        at, age = self._touch_position(touched_s, now)
        return self._chance(np.full(len(at), self._paused_row), at, self._touch_bins(age + horizon_s))

    def session_value(self, sessions: Ints, now: float) -> Floats:
        """Expected uses per second of holding, best horizon, float64 ``[n]``."""
        at, log_scale, _ = self._position(sessions, now)
        begin = at.astype(np.int64)
        value: Floats = np.exp(-log_scale)
        value *= 0.5 * (self._index[self._row[0, sessions], begin] + self._index[self._row[1, sessions], begin])
        return value

    def value_of_session(self, session: int, now: float) -> float:
        """``session_value`` of a single one, which takes a tenth of the time."""
        log_scale = self._log_scale.item(session)
        log_age = math.log(max(now - self._start.item(session), SHORTEST_S))
        begin = bin_at(log_age - log_scale, self._lows.item(self._model.item(session)))
        by_history, by_size = self._row.item(0, session), self._row.item(1, session)
        return math.exp(-log_scale) * 0.5 * (self._index.item(by_history, begin) + self._index.item(by_size, begin))

    def session_chance(self, sessions: Ints, now: float, horizon_s: float) -> Floats:
        """Probability of a use within ``horizon_s``, float64 ``[n]``.

        By history alone: a mean of two probabilities that are right is too near the middle.
        """
        at, log_scale, age = self._position(sessions, now)
        later = self._bins(np.log(age + horizon_s) - log_scale, sessions)
        return self._chance(self._row[0, sessions], at, later)

    def touch_value(self, numbers: Ints, touched_s: Floats, now: float) -> Floats:
        """As ``session_value``, for classes of shared blocks."""
        at, _ = self._touch_position(touched_s, now)
        value: Floats = self._index[self._touch_base + 1 + numbers, at.astype(np.int64)].astype(np.float64)
        return value

    def value_of_touch(self, number: int, touched_s: float, now: float) -> float:
        """``touch_value`` of a single one."""
        begin = bin_at(math.log(max(now - touched_s, SHORTEST_S)), self._touch_low)
        return self._index.item(self._touch_base + 1 + number, begin)

    def touch_chance(self, numbers: Ints, touched_s: Floats, now: float, horizon_s: float) -> Floats:
        """As ``session_chance``, for classes of shared blocks."""
        at, age = self._touch_position(touched_s, now)
        return self._chance(self._touch_base + 1 + numbers, at, self._touch_bins(age + horizon_s))

    def describe(self, session: int, now: float) -> dict[str, float | str]:
        """For people: how long it has waited and what is usual."""
        model = self._models[int(self._model[session])]
        return {
            "waiting_s": round(max(0.0, now - float(self._start[session])), 3),
            "predicted_gap_s": round(float(np.exp(self._log_scale[session])), 3) if model.scaled else "not predicted",
            "class": int(self._row[0, session]) % MAX_ROWS,
        }

    # -- inside --------------------------------------------------------------------------------------------------

    def _bases(self, model: int) -> Ints:
        """First row of the model's tables by history and by size."""
        return np.array([2 * model, 2 * model + 1], np.int64) * MAX_ROWS

    def _store(self, number: int, model: GapModel) -> None:
        for base, tables in zip(self._bases(number).tolist(), (model.by_history, model.by_size), strict=True):
            self._put(base, tables)

    def _put(self, base: int, tables: HazardTables) -> None:
        self._index[base : base + len(tables.index)] = tables.index
        self._log_survival[base : base + len(tables.index)] = tables.log_survival

    def _position(self, sessions: Ints, now: float) -> tuple[Floats, Floats, Floats]:
        """Place in the tables (a fraction of bins), log scale and age."""
        log_scale = self._log_scale[sessions]
        age = np.maximum(now - self._start[sessions], SHORTEST_S)
        return self._bins(np.log(age) - log_scale, sessions), log_scale, age

    def _bins(self, log_time: Floats, sessions: Ints) -> Floats:
        low = self._lows[self._model[sessions]]
        at: Floats = np.clip((log_time - low) / BIN_WIDTH, 0.0, NUM_BINS - 1e-6)
        return at

    def _touch_position(self, touched_s: Floats, now: float) -> tuple[Floats, Floats]:
        """Place in a table of touches, and age."""
        age = np.maximum(now - touched_s, SHORTEST_S)
        return self._touch_bins(age), age

    def _touch_bins(self, age: Floats) -> Floats:
        at: Floats = np.clip((np.log(age) - self._touch_low) / BIN_WIDTH, 0.0, NUM_BINS - 1e-6)
        return at

    def _chance(self, row: Ints, at: Floats, later: Floats) -> Floats:
        chance: Floats = -np.expm1(self._log_reach(row, later) - self._log_reach(row, at))
        return np.clip(chance, 0.0, 1.0)

    def _log_reach(self, row: Ints, at: Floats) -> Floats:
        """Log probability of waiting so long, between the edges of bins by interpolation."""
        begin = at.astype(np.int64)
        part = at - begin
        low, high = self._log_survival[row, begin], self._log_survival[row, begin + 1]
        reach: Floats = part * (high - low).astype(np.float64)
        return reach + low
