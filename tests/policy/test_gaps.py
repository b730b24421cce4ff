"""Waits, tables and index on figures whose answers are known."""

from __future__ import annotations

import logging
import math

import numpy as np
import pytest

from dflash2.policy.gaps import NUM_FEATURES, GapModel
from dflash2.policy.gittins import hit_density
from dflash2.policy.hazard import NUM_BINS, assumed_hazard, bin_of, build_tables, edges
from dflash2.policy.trust import PredictionTrust

LOW = math.log(0.05)


def test_the_index_of_a_constant_hazard_is_its_rate() -> None:
    at = edges(LOW)
    hazard = -np.expm1(-0.5 * np.diff(at))[None, :]
    density = hit_density(hazard, at)[0]
    early = at[1:] < 0.5  # bins in which hardly anybody is lost
    assert density[:-1][early[:-1]] == pytest.approx(0.5, rel=0.1)


def test_the_index_finds_the_time_that_is_worth_holding() -> None:
    """Half come back in one bin, the others never: worth holding until then, worth nothing afterwards."""
    at = edges(LOW)
    hazard = np.zeros((1, NUM_BINS))
    hazard[0, 40] = 0.5
    density = hit_density(hazard, at)[0]
    assert density[0] == pytest.approx(0.5 / at[41], rel=0.5)
    assert density[40] > density[36] > density[20] > density[0] and (density[41:] == 0).all()


def test_a_class_that_has_seen_much_differs_from_its_parent_and_one_that_has_not_does_not() -> None:
    prior = assumed_hazard(LOW, 0.5, 60.0, 1.5)
    paths = np.array([[1]] * 500 + [[2]] * 500 + [[3]])
    bins = np.array([30] * 500 + [60] * 500 + [30])
    tables, rows = build_tables(paths, bins, np.ones(1001, np.bool_), prior, LOW, 100)
    one, two, three = (tables.row_of((number,)) for number in (1, 2, 3))
    assert rows.tolist() == [one] * 500 + [two] * 500 + [three]
    assert tables.row_of((9,)) == 0
    assert tables.chance(one, 30) > 0.25 > tables.chance(three, 30) > tables.chance(two, 30)
    assert tables.chance(two, 60) > 0.25


def test_waits_that_go_on_count_as_far_as_they_have_come() -> None:
    prior = assumed_hazard(LOW, 0.5, 60.0, 1.5)
    bins = np.array([30] * 100 + [80] * 300)
    ended = np.array([True] * 100 + [False] * 300)
    tables, _ = build_tables(np.zeros((400, 0), np.int64), bins, ended, prior, LOW, 10)
    reached = np.exp(tables.log_survival[0, [20, 40, 70]])
    assert reached[0] > 0.95 and reached[1] == pytest.approx(0.78, abs=0.06) and reached[2] > 0.7


def test_bins_at_the_ends_take_what_lies_outside() -> None:
    assert bin_of(np.array([-1e9, LOW, 1e9]), LOW).tolist() == [0, 0, NUM_BINS - 1]


def test_a_gap_that_follows_from_a_feature_is_predicted() -> None:
    model, rng = GapModel(scaled=True, num_classes=1), np.random.default_rng(0)
    classes = (1, 0, 0, 0)
    for number in range(400):
        features = [1.0, float(number % 2), *[0.0] * (NUM_FEATURES - 2)]
        wait = model.begin(features, classes, 0, 100.0 * number)
        gap = (2.0 if number % 2 == 0 else 200.0) * rng.lognormal(0.0, 0.1)
        model.end(wait, 100.0 * number + gap, came_back=True)
    model.refit(1e6)
    for feature, gap in ((0.0, 2.0), (1.0, 200.0)):
        *_, log_scale = model.place(np.array([1.0, feature, *[0.0] * (NUM_FEATURES - 2)]), classes)
        assert math.exp(log_scale) == pytest.approx(gap, rel=0.1)
    assert model.trust.holds


def test_predictions_that_mislead_are_set_aside_and_tried_again(caplog: pytest.LogCaptureFixture) -> None:
    model = GapModel(scaled=True, num_classes=1)
    classes = (1, 0, 0, 0)

    def serve(start: int, count: int, short: float, long: float) -> None:
        for number in range(start, start + count):
            features = [1.0, float(number % 2), *[0.0] * (NUM_FEATURES - 2)]
            wait = model.begin(features, classes, 0, 1000.0 * number)
            model.end(wait, 1000.0 * number + (long if number % 2 else short), came_back=True)

    serve(0, 400, 2.0, 200.0)
    model.refit(4e5)
    with caplog.at_level(logging.INFO):
        serve(400, 200, 200.0, 2.0)  # the other way round
    assert not model.trust.holds and len(caplog.messages) == 1
    model.refit(6e5)
    one, other = (np.array([1.0, feature, *[0.0] * (NUM_FEATURES - 2)]) for feature in (0.0, 1.0))
    assert model.place(one, classes) == model.place(other, classes)
    serve(600, 4000, 200.0, 2.0)
    model.refit(5e6)
    assert model.trust.holds


def test_trust_is_not_lost_by_a_few_surprises() -> None:
    trust = PredictionTrust()
    for number in range(2000):
        trust.note(-3.0 if number % 10 == 0 else 0.4, number)
    assert trust.holds
