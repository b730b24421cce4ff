"""Log-probabilities of tokens, before temperature and the cuts of sampling change them."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from dflash2.engine.base import TokenLogprobs
from dflash2.engine.beam import Candidates


def token_logprobs(
    logits: torch.Tensor, token_ids: Sequence[int], num_top: Sequence[int | None]
) -> list[TokenLogprobs | None]:
    """Log-probabilities of chosen tokens and of the likeliest ones.

    Args:
        logits: float32 ``[R, V]``.
        token_ids: R chosen tokens.
        num_top: for each row how many of the likeliest tokens to tell; None for rows that ask for nothing.
    """
    asked = [row for row, count in enumerate(num_top) if count is not None]
    told: list[TokenLogprobs | None] = [None] * len(num_top)
    if not asked:
        return told
    logprobs = logits[asked].log_softmax(dim=-1)
    most = min(max(num_top[row] or 0 for row in asked), logits.shape[1])
    top = logprobs.topk(most, dim=-1)
    for index, row in enumerate(asked):
        count = num_top[row] or 0
        told[row] = TokenLogprobs(
            float(logprobs[index, token_ids[row]]),
            tuple(top.indices[index, :count].tolist()),
            tuple(top.values[index, :count].tolist()),
        )
    return told


def candidates(logits: torch.Tensor, count: int) -> Candidates:
    """The ``count`` likeliest tokens of one row (float32 ``[V]``), or all if there are fewer."""
    top = logits.log_softmax(dim=-1).topk(min(count, logits.shape[0]))
    return Candidates(tuple(top.indices.tolist()), tuple(top.values.tolist()))
