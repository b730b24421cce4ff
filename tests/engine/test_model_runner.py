"""A paged run equals the plain model, however the work is cut, mixed and laid out."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.engine.paged_case import (
    MODEL_TYPES,
    VOCAB,
    Paged,
    Sequence,
    advance,
    plain_logits,
    prompt,
    tiny_layout,
    tiny_model,
)
from transformers import PreTrainedModel

from dflash2.engine.model_loader import load_model, load_tokenizer
from dflash2.engine.model_runner import ModelRunner
from dflash2.errors import ModelError
from dflash2.types import KVLayout


def close(got: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)


def greedy(paged: Paged, sequence: Sequence, first: torch.Tensor, num_tokens: int) -> list[int]:
    """Continue ``sequence`` one token a step, starting from the logits of its prompt."""
    logits = first
    for _ in range(num_tokens - 1):
        sequence.tokens.append(int(logits.argmax()))
        logits = paged.step((sequence, 1))[0]
    return [*sequence.tokens[-(num_tokens - 1) :], int(logits.argmax())]


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_greedy_tokens_equal_generate(model_type: str) -> None:
    model = tiny_model(model_type)
    tokens = prompt(13, 1)
    expected = model.generate(torch.tensor([tokens]), max_new_tokens=12, do_sample=False, pad_token_id=0)[
        0, 13:
    ].tolist()
    paged = Paged(model)
    sequence = paged.sequence(tokens)
    assert greedy(paged, sequence, paged.step((sequence, 13))[0], 12) == expected


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_chunked_prefill_equals_plain_forward(model_type: str) -> None:
    paged = Paged(tiny_model(model_type))
    tokens = prompt(21, 2)
    sequence = paged.sequence(tokens)
    for chunk in (7, 1, 8):
        assert paged.step((sequence, chunk), wants=[False]).shape == (0, VOCAB)
    close(paged.step((sequence, 5))[0], plain_logits(paged.model, tokens))


def test_mixed_batch_gives_each_sequence_its_own_logits() -> None:
    paged = Paged(tiny_model())
    tokens = [prompt(9, 3), prompt(17, 4), prompt(6, 5), prompt(12, 6)]
    a, b, c, d = (paged.sequence(t) for t in tokens)
    paged.step((a, 8), (b, 10))
    logits = paged.step((a, 1), (b, 7), (c, 6), (d, 4), wants=[True, True, True, False])
    assert logits.shape == (3, VOCAB)
    for row, expected in zip(logits, tokens[:3], strict=True):
        close(row, plain_logits(paged.model, expected))
    close(paged.step((d, 8))[0], plain_logits(paged.model, tokens[3]))
    logits.zero_()  # an ordinary tensor: a caller may bias logits in place


def test_a_sequence_can_start_from_another_ones_blocks() -> None:
    paged = Paged(tiny_model())
    shared = prompt(8, 7)
    first = paged.sequence(shared + prompt(5, 8))
    second = paged.sequence(shared + prompt(3, 9), shared=first.table[:2])
    paged.step((first, 13))
    close(paged.step((second, 3))[0], plain_logits(paged.model, second.tokens))
    first.tokens.append(5)
    close(paged.step((first, 1))[0], plain_logits(paged.model, first.tokens))


def test_blocks_may_move_between_steps() -> None:
    paged = Paged(tiny_model())
    tokens = prompt(11, 10)
    sequence = paged.sequence(tokens, room=0)
    paged.step((sequence, 10))
    moved = [paged.num_slots - 1 - i for i in range(len(sequence.table))]
    contents = paged.pool[sequence.table].clone()
    paged.pool.fill_(float("nan"))
    paged.pool[moved] = contents
    sequence.table = moved
    close(paged.step((sequence, 1))[0], plain_logits(paged.model, tokens))


def test_company_does_not_change_the_tokens() -> None:
    tokens = prompt(10, 11)
    alone = Paged(tiny_model())
    sequence = alone.sequence(tokens)
    expected = greedy(alone, sequence, alone.step((sequence, 10))[0], 8)

    together = Paged(alone.model)
    guest, others = together.sequence(tokens), [together.sequence(prompt(n, n)) for n in (3, 15, 30)]
    logits = together.step((guest, 10), *((o, len(o.tokens)) for o in others))
    got = [int(logits[0].argmax())]
    for _ in range(7):
        guest.tokens.append(got[-1])
        for other in others:
            other.tokens.append(1)
        got.append(int(together.step(*((o, 1) for o in others), (guest, 1))[-1].argmax()))
    assert got == expected


@settings(max_examples=25)
@given(st.lists(st.tuples(st.integers(1, 30), st.integers(1, 9)), min_size=1, max_size=4), st.sampled_from([1, 3, 8]))
def test_any_interleaving_equals_plain_forward(shapes: list[tuple[int, int]], block_size: int) -> None:
    paged = Paged(tiny_model(), block_size=block_size, num_slots=256)
    work = [(paged.sequence(prompt(length, length)), chunk) for length, chunk in shapes]
    while unfinished := [(s, min(chunk, len(s.tokens) - s.done)) for s, chunk in work if s.done < len(s.tokens)]:
        logits = paged.step(*unfinished)
        for (sequence, _), row in zip(unfinished, logits, strict=True):
            close(row, plain_logits(paged.model, sequence.tokens[: sequence.done]))


def test_two_models_in_one_process_do_not_mix() -> None:
    left, right = Paged(tiny_model(seed=1)), Paged(tiny_model("qwen3", seed=2))
    tokens = prompt(9, 12)
    a, b = left.sequence(tokens), right.sequence(tokens)
    left.step((a, 8))
    right.step((b, 8))
    close(left.step((a, 1))[0], plain_logits(left.model, tokens))
    close(right.step((b, 1))[0], plain_logits(right.model, tokens))


def test_logits_are_float32_for_a_bfloat16_model() -> None:
    model: PreTrainedModel = tiny_model().to(torch.bfloat16)
    layout = KVLayout(2, 2, 8, 4, "bfloat16")
    runner = ModelRunner(model, torch.zeros(2, *layout.block_shape, dtype=torch.bfloat16), layout)
    logits = advance(runner, (Sequence(prompt(6, 1), [1, 0]), 6))
    assert logits.dtype == torch.float32


def test_pool_of_another_shape_or_dtype_is_refused() -> None:
    layout = tiny_layout()
    with pytest.raises(ValueError, match="shape"):
        ModelRunner(tiny_model(), torch.zeros(3, 2, 2, 5, 2, 8), layout)
    with pytest.raises(ValueError, match="dtype"):
        ModelRunner(tiny_model(), torch.zeros(3, *layout.block_shape, dtype=torch.float16), layout)
    with pytest.raises(ValueError, match="contiguous"):
        ModelRunner(tiny_model(), torch.zeros(6, *layout.block_shape)[::2], layout)


def test_a_model_set_to_paging_says_so_when_run_directly() -> None:
    paged = Paged(tiny_model())
    with pytest.raises(ModelError, match="ModelRunner"):
        paged.model(torch.tensor([[1, 2]]), use_cache=False)


@pytest.mark.e2e
def test_real_model_equals_generate(model_path: Path) -> None:
    loaded = load_model(model_path)
    tokenizer = load_tokenizer(model_path)
    prompts = ["The capital of France is", "def fibonacci(n):\n", "Once upon a time, in a village by the sea,"]
    encoded = [tokenizer(text).input_ids for text in prompts]
    num_tokens = 24
    expected = [
        loaded.model.generate(
            torch.tensor([ids]),
            attention_mask=torch.ones(1, len(ids), dtype=torch.long),
            max_new_tokens=num_tokens,
            min_new_tokens=num_tokens,
            do_sample=False,
            pad_token_id=0,
        )[0, len(ids) :].tolist()
        for ids in encoded
    ]
    layout = loaded.kv_layout(16)
    pool = torch.full((32, *layout.block_shape), float("nan"))
    slots = np.random.default_rng(0).permutation(32).tolist()
    runner = ModelRunner(loaded.model, pool, layout)
    sequences = [Sequence(list(ids), [slots.pop() for _ in range(5)]) for ids in encoded]
    logits = advance(runner, *((s, len(s.tokens)) for s in sequences))
    got: list[list[int]] = [[] for _ in sequences]
    for _ in range(num_tokens):
        # generate() was told to go on past the end of the answer, so that token is never chosen here either.
        logits[:, list(loaded.eos_token_ids)] = float("-inf")
        for sequence, answer, row in zip(sequences, got, logits, strict=True):
            answer.append(int(row.argmax()))
            sequence.tokens.append(answer[-1])
        logits = advance(runner, *((s, 1) for s in sequences))
    assert got == expected
