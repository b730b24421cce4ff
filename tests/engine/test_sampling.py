"""Bounds of sampling parameters, and choices that depend on nothing but their own row."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from dflash2.engine.sampling import SamplingParams, resolve_seed, sample
from dflash2.errors import RequestError

GREEDY = SamplingParams(temperature=0.0)


def draws(logits: list[float], params: SamplingParams, count: int = 4000) -> np.ndarray:
    """Frequencies of each token over ``count`` steps of one request."""
    rows = torch.tensor([logits]).expand(count, -1)
    chosen = sample(rows, [params] * count, [7] * count, range(count)).token_ids
    return np.bincount(chosen, minlength=len(logits)) / count


@pytest.mark.parametrize(
    ("param", "value"),
    [
        ("max_tokens", 0),
        ("temperature", -0.1),
        ("temperature", float("nan")),
        ("temperature", float("inf")),
        ("top_p", 0.0),
        ("top_p", 1.01),
        ("top_p", float("nan")),
        ("top_k", 0),
        ("top_k", -1),
        ("stop_token_ids", (-1,)),
        ("stop_token_ids", tuple(range(257))),
        ("seed", 2**63),
        ("n", 0),
        ("n", 17),
        ("logprobs", 21),
        ("beam_width", 5),
    ],
)
def test_values_out_of_bounds_are_refused_by_name(param: str, value: Any) -> None:
    with pytest.raises(RequestError) as caught:
        SamplingParams(**{param: value}).validate()
    assert caught.value.param == param


def test_values_at_the_bounds_are_accepted() -> None:
    SamplingParams().validate()
    SamplingParams(max_tokens=1, temperature=0.0, top_p=1.0, top_k=1).validate()
    SamplingParams(temperature=5e-324, top_p=1e-9, seed=-(2**63)).validate()


def test_greedy_rows_take_the_best_token_and_report_its_lead() -> None:
    result = sample(torch.tensor([[0.0, 3.0, 1.0], [2.0, 1.5, 2.0]]), [GREEDY] * 2, [0, 0], [0, 0], with_gaps=True)
    assert result.token_ids.tolist() == [1, 0]
    assert result.gaps is not None
    assert result.gaps.tolist() == [2.0, 0.0]
    assert result.token_ids.dtype == np.int32


def test_gaps_are_left_out_unless_asked_for() -> None:
    assert sample(torch.zeros(1, 3), [GREEDY], [0], [0]).gaps is None


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_frequencies_follow_the_softmax(temperature: float) -> None:
    logits = [1.0, 0.0, 2.0, -1.0]
    expected = torch.tensor(logits).div(temperature).softmax(0).numpy()
    np.testing.assert_allclose(draws(logits, SamplingParams(temperature=temperature)), expected, atol=0.03)


def test_top_k_keeps_the_k_best_in_proportion() -> None:
    got = draws([1.0, 0.0, 2.0, -1.0], SamplingParams(top_k=2))
    np.testing.assert_allclose(got, [1 / (1 + np.e), 0, np.e / (1 + np.e), 0], atol=0.03)


def test_top_p_keeps_the_smallest_set_that_reaches_it() -> None:
    logits = np.log([0.1, 0.5, 0.15, 0.25]).tolist()
    np.testing.assert_allclose(draws(logits, SamplingParams(top_p=0.7)), [0, 2 / 3, 0, 1 / 3], atol=0.03)
    np.testing.assert_allclose(draws(logits, SamplingParams(top_p=0.8)), [0, 5 / 9, 1 / 6, 5 / 18], atol=0.03)
    assert draws(logits, SamplingParams(top_p=1e-6))[1] == 1.0


def test_top_p_beyond_the_first_candidates_keeps_enough() -> None:
    rows = torch.zeros(300, 2000)
    chosen = sample(rows, [SamplingParams(top_p=0.9)] * 300, [1] * 300, range(300)).token_ids
    assert len(set(chosen.tolist())) > 200


def test_top_p_applies_within_top_k() -> None:
    logits = np.log([0.4, 0.3, 0.2, 0.1]).tolist()
    got = draws(logits, SamplingParams(top_k=2, top_p=0.5))
    assert got[0] == 1.0


@pytest.mark.parametrize("temperature", [1e-30, 5e-324])
def test_a_tiny_temperature_is_greedy(temperature: float) -> None:
    assert draws([1.0, 1.5, 0.0], SamplingParams(temperature=temperature), 20)[1] == 1.0


def test_a_choice_does_not_depend_on_the_batch() -> None:
    torch.manual_seed(0)
    logits = torch.randn(6, 50)
    params = [SamplingParams(), GREEDY, SamplingParams(top_k=9), SamplingParams(top_p=0.6)] + [SamplingParams()] * 2
    seeds, steps = [11, 0, 12, 13, 14, 14], [0, 5, 6, 7, 8, 9]
    together = sample(logits, params, seeds, steps).token_ids.tolist()
    order = [4, 2, 0, 5, 1, 3]
    shuffled = sample(logits[order], *([x[i] for i in order] for x in (params, seeds, steps))).token_ids.tolist()
    assert [shuffled[order.index(i)] for i in range(6)] == together
    for i in range(6):
        assert sample(logits[i : i + 1], [params[i]], [seeds[i]], [steps[i]]).token_ids.tolist() == [together[i]]


def test_seed_and_step_both_matter() -> None:
    rows = torch.zeros(64, 1000)
    by_step = sample(rows, [SamplingParams()] * 64, [3] * 64, range(64)).token_ids
    by_seed = sample(rows, [SamplingParams()] * 64, range(64), [3] * 64).token_ids
    assert len(set(by_step.tolist())) > 50
    assert len(set(by_seed.tolist())) > 50


def test_rows_that_are_not_numbers_are_marked_and_harm_no_other() -> None:
    bad, good = [float("nan"), 1.0, 0.0], [0.0, 5.0, float("-inf")]
    rows = torch.tensor([bad, good, [float("-inf")] * 3, bad])
    result = sample(rows, [SamplingParams(), GREEDY, SamplingParams(), GREEDY], [0] * 4, [0] * 4)
    assert result.is_valid.tolist() == [False, True, False, False]
    assert result.token_ids[1] == 1


def test_seeds_are_taken_or_drawn() -> None:
    assert resolve_seed(SamplingParams(seed=5)) == 5
    assert 0 <= resolve_seed(SamplingParams(seed=-1)) < 2**64
    assert resolve_seed(SamplingParams()) != resolve_seed(SamplingParams())


def test_lengths_must_agree() -> None:
    with pytest.raises(ValueError, match="length"):
        sample(torch.zeros(2, 3), [GREEDY], [0], [0])
