"""What the models are told of a request."""

from __future__ import annotations

import math

import pytest

from dflash2.policy.features import RequestFigures, at_arrival, at_end
from dflash2.policy.gaps import NUM_FEATURES
from dflash2.policy.sessions import History, Session


def features(beam_width: int) -> tuple[list[float], list[float]]:
    figures, session = RequestFigures(1, 1000, 200, beam_width), Session(0, turns=2)
    return at_arrival(figures, session, 3.0, after_tool=False), at_end(
        figures, session, 50, History(), 3.0, by_stop=True
    )


def test_beams_are_a_figure_of_their_own_that_says_nothing_of_ordinary_requests() -> None:
    for ordinary, searched in zip(features(1), features(4), strict=True):
        assert len(ordinary) == len(searched) == NUM_FEATURES
        assert ordinary[:-1] == searched[:-1] and ordinary[-1] == 0.0
        assert searched[-1] == pytest.approx(math.log(4))
