"""Beam search against transformers' own, and its rules one by one."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from tests.server.model_server import tiny_engine, tiny_loaded

from dflash2.engine.base import FinishReason, GenerationRequest
from dflash2.engine.beam import Beam, BeamSearch, Candidates
from dflash2.engine.model_loader import LoadedModel
from dflash2.engine.sampling import SamplingParams

PAD = 257


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    return tiny_loaded()


def reference(loaded: LoadedModel, prompt: list[int], width: int, penalty: float, ends: list[int]) -> list[list[int]]:
    model: Any = loaded.model
    used = model.config._attn_implementation
    model.set_attn_implementation("sdpa")
    rows = model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        num_beams=width,
        num_return_sequences=width,
        max_new_tokens=8,
        do_sample=False,
        early_stopping=False,
        length_penalty=penalty,
        eos_token_id=ends or None,
        pad_token_id=PAD,
    )[:, len(prompt) :]
    model.set_attn_implementation(used)
    return [[token for token in row.tolist() if token != PAD] for row in rows]


@pytest.mark.parametrize("num_ends", [0, 1, 60])
@pytest.mark.parametrize("penalty", [0.0, 1.0, 2.5, -1.0])
@pytest.mark.parametrize("width", [2, 3, 4])
def test_the_engine_finds_what_transformers_finds(
    loaded: LoadedModel, width: int, penalty: float, num_ends: int
) -> None:
    engine = tiny_engine(loaded)
    for number in range(3):
        prompt = np.random.default_rng(number).integers(0, 250, 5 + 4 * number).tolist()
        ends = list(range(40, 40 + num_ends))
        sampling = SamplingParams(
            max_tokens=8, n=width, beam_width=width, length_penalty=penalty, stop_token_ids=tuple(ends)
        )
        engine.add(GenerationRequest("r", np.array(prompt, np.int32), sampling, 0.0))
        found: list[list[int]] = [[] for _ in range(width)]
        while engine.has_work:
            for output in engine.step():
                assert output.token_id is not None
                found[output.index].append(output.token_id)
        assert found == reference(loaded, prompt, width, penalty, ends)
    engine.check_integrity()
    engine.close()


def beam(tokens: tuple[int, ...], score: float, **candidates: float) -> Beam:
    ids = tuple(int(name[1:]) for name in candidates)
    return Beam(tokens, score, Candidates(ids, tuple(candidates.values())))


def test_all_beams_may_come_from_one_parent() -> None:
    search = BeamSearch(2, 5, 1.0, frozenset())
    going = search.advance([beam((1,), -1.0, t5=-0.1, t6=-0.2, t7=-3.0), beam((2,), -9.0, t5=-0.1, t6=-0.2)])
    assert [(one.parent, one.token_id) for one in going] == [(0, 5), (0, 6)]


def test_an_answer_completes_only_among_the_best() -> None:
    search = BeamSearch(1, 5, 1.0, frozenset({9}))
    going = search.advance([beam((), 0.0, t5=-0.1, t9=-0.2)])
    assert [one.token_id for one in going] == [5] and search.best(1) == []
    search.advance([beam((5,), -0.1, t9=-0.2, t6=-0.3)])
    assert [(one.token_ids, one.reason) for one in search.best(1)] == [((5, 9), FinishReason.STOP)]


def test_the_last_token_completes_every_beam() -> None:
    search = BeamSearch(2, 1, 1.0, frozenset())
    assert search.advance([beam((), 0.0, t5=-0.1, t6=-0.2, t7=-0.3)]) == []
    assert [one.token_ids for one in search.best(2)] == [(5,), (6,)]
    assert {one.reason for one in search.best(2)} == {FinishReason.LENGTH}
