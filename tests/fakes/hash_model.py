"""A "model" whose next token is a hash of the whole KV that it reads: any wrong or missing KV changes the output."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from dflash2.engine.batch import StepBatch
from dflash2.types import KVLayout

VOCAB = 50
MASK = (1 << 64) - 1


def layout(block_size: int) -> KVLayout:
    """One 64-bit word per token."""
    return KVLayout(num_layers=1, num_kv_heads=1, head_dim=1, block_size=block_size, dtype="float32")


def words_of(hbm: torch.Tensor) -> npt.NDArray[np.uint64]:
    """The pool as uint64 ``[num_slots, block_size]``, the same memory."""
    flat = hbm.view(hbm.shape[0], -1).view(torch.int64).numpy()
    return flat.view(np.uint64)


def answer(prompt: list[int], num_tokens: int) -> list[int]:
    """The reference, in plain Python, without blocks, pools or batches."""
    words: list[int] = []
    tokens = list(prompt)
    for _ in range(num_tokens):
        for token in tokens[len(words) :]:
            words.append(_mix(_fold(words), token))
        tokens.append(_fold(words) % VOCAB)
    return tokens[len(prompt) :]


def spread_logits(state: int) -> torch.Tensor:
    """float32 ``[VOCAB]``: every token has its own, all depend on the whole past."""
    mixed = [(state * (2 * token + 1) & MASK) * 0x94D049BB133111EB & MASK for token in range(VOCAB)]
    return torch.tensor([word / 2**62 for word in mixed], dtype=torch.float32)


def spread_after(tokens: list[int]) -> torch.Tensor:
    """The reference for ``spread_logits`` behind these tokens."""
    words: list[int] = []
    for token in tokens:
        words.append(_mix(_fold(words), token))
    return spread_logits(_fold(words))


def _fold(words: list[int]) -> int:
    state = len(words) + 1
    for index, word in enumerate(words):
        state = (state + word * (2 * index + 1)) & MASK
    return (state ^ state >> 31) * 0x9E3779B97F4A7C15 & MASK


def _mix(past: int, token: int) -> int:
    word = (past + (token + 1) * 0xBF58476D1CE4E5B9) & MASK
    return word ^ word >> 29


class HashRunner:
    """Runs steps like ``ModelRunner``: reads KV through the block tables, writes the new tokens' KV.

    Args:
        words: uint64 ``[num_slots, block_size]``, the HBM pool.
    """

    def __init__(self, words: npt.NDArray[np.uint64]) -> None:
        self.words = words
        self.num_steps = 0
        self.num_computed = 0
        self.broken: set[int] = set()
        """Steps whose logits are not finite."""
        self.spread = False
        """``spread_logits`` in place of a 1 for one token and 0 for all others."""

    def run(self, batch: StepBatch) -> torch.Tensor:
        self._check(batch)
        self.num_steps += 1
        self.num_computed += len(batch.token_ids)
        written: set[tuple[int, int]] = set()
        rows, start = [], 0
        for table, length, query, wants in zip(
            batch.block_tables, batch.context_lens.tolist(), batch.query_lens.tolist(), batch.wants_logits, strict=True
        ):
            for index in range(length - query, length):
                at = (int(table[index // self._block_size]), index % self._block_size)
                assert at not in written, "two sequences write to one place"
                written.add(at)
                self.words[at] = _mix(self._read(table, index), int(batch.token_ids[start + index - length + query]))
            start += query
            if wants:
                rows.append(self._read(table, length))
        logits = torch.zeros(len(rows), VOCAB)
        for row, state in zip(logits, rows, strict=True):
            row.copy_(spread_logits(state)) if self.spread else row.index_fill_(0, torch.tensor(state % VOCAB), 1.0)
        return logits * float("nan") if self.num_steps in self.broken else logits

    def close(self) -> None:
        pass

    @property
    def _block_size(self) -> int:
        return int(self.words.shape[1])

    def _read(self, table: npt.NDArray[np.int32], length: int) -> int:
        return _fold(self.words[table].reshape(-1)[:length].tolist())

    def _check(self, batch: StepBatch) -> None:
        assert batch.token_ids.dtype == batch.positions.dtype == np.int32
        assert len(batch.token_ids) == len(batch.positions) == batch.query_lens.sum()
        ends = np.cumsum(batch.query_lens)
        for end, query, context in zip(ends, batch.query_lens, batch.context_lens, strict=True):
            assert batch.positions[end - query : end].tolist() == list(range(context - query, context))
