"""Beam search over one request: which beams go on and with which token, and which answers are complete.

The rules are those of ``generate(num_beams=..., early_stopping=False)`` of transformers, and the tests compare with it:
answers are ranked by the sum of their tokens' log-probabilities over ``length ** length_penalty``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dflash2.engine.base import FinishReason


@dataclass(frozen=True, slots=True)
class Candidates:
    """The likeliest next tokens of one beam, the likeliest first, with their log-probabilities."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Beam:
    """One beam before its next token.

    Attributes:
        token_ids: generated so far.
        score: sum of their log-probabilities.
        candidates: at least ``BeamSearch.num_candidates`` of them, or the whole vocabulary.
    """

    token_ids: tuple[int, ...]
    score: float
    candidates: Candidates


@dataclass(frozen=True, slots=True)
class Continuation:
    """Beam ``parent`` goes on with ``token_id`` and has ``score`` then."""

    parent: int
    token_id: int
    score: float


@dataclass(frozen=True, slots=True)
class Hypothesis:
    """A complete answer. ``score`` is the one that answers are ranked by."""

    token_ids: tuple[int, ...]
    score: float
    reason: FinishReason


class BeamSearch:
    """State of one request's search: its complete answers, the best ``width`` of them.

    Args:
        width: beams side by side.
        max_tokens: longest answer.
        length_penalty: above 0 favours long answers, below 0 short ones.
        end_token_ids: tokens that complete an answer.
    """

    def __init__(self, width: int, max_tokens: int, length_penalty: float, end_token_ids: frozenset[int]) -> None:
        self._width = width
        self._max_tokens = max_tokens
        self._length_penalty = length_penalty
        self._end_token_ids = end_token_ids
        self._complete: list[Hypothesis] = []

    @property
    def num_candidates(self) -> int:
        """Tokens to look at per beam: enough for ``width`` beams to go on whichever of them end an answer."""
        return max(2, 1 + len(self._end_token_ids)) * self._width

    def advance(self, beams: Sequence[Beam]) -> list[Continuation]:
        """One token further, all beams together.

        Args:
            beams: with equally many tokens; one at first, then those of the last call's continuations.

        Returns:
            How it goes on, the best first, at most ``width``; empty if the search is over.
        """
        length = len(beams[0].token_ids) + 1
        ranked = self._ranked(beams)
        is_last = length >= self._max_tokens
        going: list[Continuation] = []
        for rank, one in enumerate(ranked):
            ends = one.token_id in self._end_token_ids
            if not ends and not is_last:
                going.append(one)
            elif rank < self._width:
                self._note_complete(beams[one.parent].token_ids, one, ends)
        going = going[: self._width]
        return going if going and self._can_improve(going[0].score, length) else []

    def best(self, count: int) -> list[Hypothesis]:
        """The best complete answers, the best first; once the search is over."""
        return self._complete[:count]

    def _ranked(self, beams: Sequence[Beam]) -> list[Continuation]:
        every = [
            Continuation(parent, token_id, beam.score + logprob)
            for parent, beam in enumerate(beams)
            for token_id, logprob in zip(beam.candidates.token_ids, beam.candidates.logprobs, strict=True)
        ]
        return sorted(every, key=lambda one: -one.score)[: self.num_candidates]

    def _note_complete(self, before: tuple[int, ...], last: Continuation, ends: bool) -> None:
        token_ids = (*before, last.token_id)
        reason = FinishReason.STOP if ends else FinishReason.LENGTH
        self._complete.append(Hypothesis(token_ids, self._penalised(last.score, len(token_ids)), reason))
        self._complete = sorted(self._complete, key=lambda one: -one.score)[: self._width]

    def _can_improve(self, best_score: float, length: int) -> bool:
        full = len(self._complete) == self._width
        return not full or self._penalised(best_score, length) > self._complete[-1].score

    def _penalised(self, score: float, length: int) -> float:
        return float(score / length**self._length_penalty)
