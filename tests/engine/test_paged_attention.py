"""What a step reads from and writes to the pool, and which batches it refuses."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from tests.engine.paged_case import Paged, Sequence, batch_of, prompt, tiny_layout, tiny_model

from dflash2.engine.paged_attention import ATTENTION_NAME, GATHER_BYTES, KVStep
from dflash2.engine.paged_pool import GatherWorkspace, PagedPool

HEADS = 4


def reference(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Attention written out: query ``[n, heads, d]`` at the end of keys ``[m, kv_heads, d]``."""
    n, m, group = query.shape[0], keys.shape[0], query.shape[1] // keys.shape[1]
    keys, values = keys.repeat_interleave(group, 1), values.repeat_interleave(group, 1)
    scores = torch.einsum("nhd,mhd->hnm", query, keys) / query.shape[-1] ** 0.5
    late = torch.arange(m) > torch.arange(m - n, m)[:, None]
    return torch.einsum("hnm,mhd->nhd", scores.masked_fill(late, float("-inf")).softmax(-1), values)


def filled_pool(num_slots: int = 40) -> tuple[torch.Tensor, PagedPool]:
    torch.manual_seed(5)
    pool = torch.randn(num_slots, *tiny_layout().block_shape)
    return pool, PagedPool(pool, tiny_layout())


def test_new_keys_and_values_land_in_their_slots_and_nowhere_else() -> None:
    pool, view = filled_pool()
    before = pool.clone()
    sequence = Sequence(prompt(7, 0), [9, 2], done=3)
    step = KVStep(view, GatherWorkspace(view), batch_of((sequence, 4)))
    key, value = torch.randn(1, 2, 4, 8), torch.randn(1, 2, 4, 8)
    step.attend(1, torch.randn(1, HEADS, 4, 8), key, value, None)
    for i, (slot, offset) in enumerate([(9, 3), (2, 0), (2, 1), (2, 2)]):
        assert torch.equal(pool[slot, 1, 0, offset], key[0, :, i])
        assert torch.equal(pool[slot, 1, 1, offset], value[0, :, i])
        before[slot, 1, :, offset] = pool[slot, 1, :, offset]
    assert torch.equal(pool, before)


@pytest.mark.parametrize("lens", [[(1, 9), (1, 4), (1, 17)], [(5, 5), (1, 8), (6, 14), (3, 3), (1, 1)], [(4, 12)]])
def test_attention_equals_the_definition(lens: list[tuple[int, int]]) -> None:
    pool, view = filled_pool()
    slots = np.random.default_rng(1).permutation(40).tolist()
    work = [(Sequence(prompt(c, c), [slots.pop() for _ in range(6)], done=c - n), n) for n, c in lens]
    total = sum(n for n, _ in lens)
    query, key, value = torch.randn(1, HEADS, total, 8), torch.randn(1, 2, total, 8), torch.randn(1, 2, total, 8)
    out = KVStep(view, GatherWorkspace(view), batch_of(*work)).attend(0, query, key, value, None)
    assert out.shape == (1, total, HEADS, 8)
    start = 0
    for (sequence, n), (_, context) in zip(work, lens, strict=True):
        keys, values = pool[sequence.table, 0].transpose(0, 1).reshape(2, -1, 2, 8)[:, :context]
        expected = reference(query[0, :, start : start + n].transpose(0, 1), keys, values)
        torch.testing.assert_close(out[0, start : start + n], expected, rtol=1e-5, atol=1e-5)
        start += n


def test_a_decoding_sequence_gets_the_same_bits_in_any_company() -> None:
    _, view = filled_pool()
    lone, other = Sequence(prompt(9, 0), [1, 2, 3], done=8), Sequence(prompt(6, 0), [4, 5], done=5)
    query, key, value = torch.randn(1, HEADS, 2, 8), torch.randn(1, 2, 2, 8), torch.randn(1, 2, 2, 8)
    together = KVStep(view, GatherWorkspace(view), batch_of((other, 1), (lone, 1))).attend(0, query, key, value, None)
    alone = KVStep(view, GatherWorkspace(view), batch_of((lone, 1)))
    assert torch.equal(alone.attend(0, query[:, :, 1:], key[:, :, 1:], value[:, :, 1:], None)[0, 0], together[0, 1])


def test_contexts_too_large_for_one_gather_are_split(monkeypatch: pytest.MonkeyPatch) -> None:
    model, tokens = tiny_model(), [prompt(n, n) for n in (20, 9, 30, 5)]

    def logits() -> torch.Tensor:
        paged = Paged(model)
        sequences = [paged.sequence(t, room=0) for t in tokens]
        paged.step(*((s, len(s.tokens) - 1) for s in sequences))
        return paged.step(*((s, 1) for s in sequences))

    assert GATHER_BYTES > 1 << 16  # all four share one gather
    joined = logits()
    monkeypatch.setattr("dflash2.engine.paged_attention.GATHER_BYTES", 8 * tiny_layout().block_bytes // 4)
    assert torch.equal(logits(), joined)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"query_lens": np.array([0], np.int32)}, "new tokens"),
        ({"context_lens": np.array([3], np.int32)}, "new tokens"),
        ({"block_tables": [np.array([1], np.int32)]}, "blocks"),
        ({"block_tables": [np.array([1, 40], np.int32)]}, "outside"),
        ({"block_tables": [np.array([1, -1], np.int32)]}, "outside"),
        ({"positions": np.array([0, 1, 2, 3, 5], np.int32)}, "positions"),
    ],
)
def test_inconsistent_batches_are_refused(changes: dict[str, Any], message: str) -> None:
    _, view = filled_pool()
    batch = replace(batch_of((Sequence(prompt(5, 0), [1, 2]), 5)), **changes)
    with pytest.raises(ValueError, match=message):
        KVStep(view, GatherWorkspace(view), batch)


def test_a_workspace_gives_no_more_than_was_reserved() -> None:
    _, view = filled_pool()
    workspace = GatherWorkspace(view)
    workspace.reserve(3)
    assert workspace.take(3)[0].shape == (3, 4 * 2 * 8)
    with pytest.raises(ValueError, match="reserved"):
        workspace.take(5)


def test_the_registered_name_is_not_taken_for_a_kernel() -> None:
    assert "flash" not in ATTENTION_NAME
