"""How the next token is chosen from logits: limits per request, and one choice per row."""

from __future__ import annotations

import hashlib
import math
import secrets
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from dflash2.errors import RequestError
from dflash2.types import BoolArray, FloatArray, IntArray

MAX_STOP_TOKEN_IDS = 256
MAX_ANSWERS = 16
MAX_BEAM_WIDTH = 4
MAX_LOGPROBS = 20
_CANDIDATES = 512
"""Top-p first looks at this many likeliest tokens; sorting a whole vocabulary takes milliseconds."""


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """What one request asks for. Stop strings are looked for where tokens become text.

    Attributes:
        max_tokens: tokens to generate at most.
        temperature: 0 takes the likeliest token.
        top_p: the smallest set of likeliest tokens with at least this probability; 1 keeps all.
        top_k: the k likeliest tokens; None keeps all.
        stop_token_ids: tokens that end the answer, besides the model's own.
        ignore_eos: go on after the model's end-of-sequence token.
        seed: makes the choices repeatable, whatever else is in the batch; None draws one.
        n: answers per prompt.
        logprobs: tell the log-probability of each token and of so many of the likeliest ones; None: of none.
        beam_width: search with so many beams instead of drawing tokens, and answer with the ``n`` best; None: do not.
        length_penalty: of beam search; above 0 favours long answers.
    """

    max_tokens: int = 128
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int | None = None
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    seed: int | None = None
    n: int = 1
    logprobs: int | None = None
    beam_width: int | None = None
    length_penalty: float = 1.0

    @property
    def num_branches(self) -> int:
        """Sequences that are decoded side by side."""
        return self.n if self.beam_width is None else self.beam_width

    @property
    def is_greedy(self) -> bool:
        """True where no chance is involved."""
        return self.temperature == 0.0

    def validate(self) -> None:
        """Check every field.

        Raises:
            RequestError: names the first field that is out of bounds.
        """
        _require(self.max_tokens >= 1, "max_tokens", "must be at least 1")
        _require(
            math.isfinite(self.temperature) and self.temperature >= 0, "temperature", "must be finite and not below 0"
        )
        _require(0 < self.top_p <= 1, "top_p", "must be above 0 and at most 1")
        _require(self.top_k is None or self.top_k >= 1, "top_k", "must be at least 1, or left out")
        _require(
            len(self.stop_token_ids) <= MAX_STOP_TOKEN_IDS, "stop_token_ids", f"has more than {MAX_STOP_TOKEN_IDS}"
        )
        _require(all(token >= 0 for token in self.stop_token_ids), "stop_token_ids", "contains a negative id")
        _require(self.seed is None or -(2**63) <= self.seed < 2**63, "seed", "must fit 64 bits")
        _require(1 <= self.n <= MAX_ANSWERS, "n", f"must lie in 1...{MAX_ANSWERS}")
        _require(
            self.logprobs is None or 0 <= self.logprobs <= MAX_LOGPROBS, "logprobs", f"must lie in 0...{MAX_LOGPROBS}"
        )
        if self.beam_width is not None:
            _require(1 <= self.beam_width <= MAX_BEAM_WIDTH, "beam_width", f"must lie in 1...{MAX_BEAM_WIDTH}")
            _require(self.n <= self.beam_width, "n", "must not be above the beam width")
            _require(math.isfinite(self.length_penalty), "length_penalty", "must be finite")
            _require(self.logprobs is None, "logprobs", "cannot be told of beams")


def _require(holds: bool, param: str, problem: str) -> None:
    if not holds:
        raise RequestError(f"{param} {problem}", param)


@dataclass(frozen=True, slots=True, eq=False)
class SampleResult:
    """The choices for R rows.

    Attributes:
        token_ids: int32 ``[R]``. Meaningless where ``is_valid`` is False.
        is_valid: bool ``[R]``; False where the logits contain NaN or have no finite maximum.
        gaps: float32 ``[R]``, best logit less second best (a small one means that rounding decides), or None
            unless asked for.
    """

    token_ids: IntArray
    is_valid: BoolArray
    gaps: FloatArray | None = None


def resolve_seed(params: SamplingParams) -> int:
    """The request's seed as a non-negative 64-bit number; drawn once, when the request arrives, if it names none."""
    return secrets.randbits(64) if params.seed is None else params.seed % 2**64


def branch_seed(seed: int, index: int) -> int:
    """Seed of a request's branch, 64 bits; the first branch has the request's own."""
    if index == 0:
        return seed
    digest = hashlib.blake2b(seed.to_bytes(8, "little") + index.to_bytes(8, "little"), digest_size=8)
    return int.from_bytes(digest.digest(), "little")


def sample(
    logits: torch.Tensor,
    params: Sequence[SamplingParams],
    seeds: Sequence[int],
    steps: Sequence[int],
    with_gaps: bool = False,
) -> SampleResult:
    """Choose one token per row. A row's choice depends on its own logits, parameters, seed and step only.

    Args:
        logits: float32 ``[R, V]``, V >= 2.
        params: R requests' parameters.
        seeds: R numbers from ``resolve_seed``.
        steps: R counts of tokens generated before this one; (seed, step) determines the random number.
        with_gaps: also report how far the best logit is ahead.

    Raises:
        ValueError: the lengths differ.
    """
    if not len(params) == len(seeds) == len(steps) == logits.shape[0]:
        raise ValueError("logits, params, seeds and steps differ in length")
    best, token_ids = logits.max(dim=-1)
    is_valid = torch.isfinite(best).cpu().numpy()
    chosen = token_ids.cpu().numpy().astype(np.int32)
    for row, (p, seed, step) in enumerate(zip(params, seeds, steps, strict=True)):
        if not p.is_greedy and is_valid[row]:
            chosen[row] = _draw(logits[row], p, _uniform(seed, step))
    gaps = None
    if with_gaps:
        top = logits.topk(2, dim=-1).values
        gaps = (top[:, 0] - top[:, 1]).cpu().numpy()
    return SampleResult(chosen, is_valid, gaps)


def _uniform(seed: int, step: int) -> float:
    """A number in [0, 1) from a counter-based generator: no state to keep, move or restore."""
    return float(np.random.Generator(np.random.Philox(key=seed, counter=step << 64)).random())


def _draw(logits: torch.Tensor, params: SamplingParams, uniform: float) -> int:
    """One token of one row, by inverting the cumulative distribution in float64."""
    # The maximum is taken off first, so that a tiny temperature yields -inf for the others instead of inf - inf.
    scaled = (logits.double() - logits.max()) / params.temperature
    weights = scaled.exp()
    tokens = None
    if params.top_k is not None and params.top_k < weights.numel():
        weights, tokens = weights.topk(params.top_k)
    if params.top_p < 1:
        weights, order = _nucleus(weights, params.top_p)
        tokens = order if tokens is None else tokens[order]
    cumulative = weights.cumsum(0)
    index = int(torch.searchsorted(cumulative, cumulative[-1] * uniform, right=True))
    index = min(index, weights.numel() - 1)
    return index if tokens is None else int(tokens[index])


def _nucleus(weights: torch.Tensor, top_p: float) -> tuple[torch.Tensor, torch.Tensor]:
    """The likeliest tokens that together reach ``top_p``: their weights, falling, and their indices."""
    needed = weights.sum() * top_p
    values, order = weights.topk(min(_CANDIDATES, weights.numel()))
    if values.sum() < needed:
        values, order = weights.sort(descending=True, stable=True)
    kept = int(torch.searchsorted(values.cumsum(0), needed)) + 1
    return values[:kept], order[:kept]
