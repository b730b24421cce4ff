"""How long an answer will be: quantiles per class of request, learned from those that have ended."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from dflash2.cache.waiting import length_class

QUANTILE = 0.95
"""Share of answers that end within their reservation, as far as the past tells."""
MIN_ENDED = 16
"""Answers of a class that must have ended before it is believed."""
UNKNOWN_TOKENS = 256
"""What is reserved while nothing is known, if ``max_tokens`` is not less. A chat without a limit of its own may use the
whole context and hardly ever does: ten of those must not wait for each other on a small machine."""
HALVE_EVERY = 512
"""Observations of a class after which all before count half: what clients ask for changes."""
BUCKETS_PER_OCTAVE = 8
NUM_BUCKETS = 1 + 24 * BUCKETS_PER_OCTAVE


@dataclass(frozen=True, slots=True)
class RequestClass:
    """Requests whose answers are about equally long.

    Attributes:
        adapter: LoRA adapter; None for the base model.
        prompt_class: ``length_class`` of the prompt.
        limit_class: ``length_class`` of ``max_tokens``.
    """

    adapter: str | None
    prompt_class: int
    limit_class: int

    @classmethod
    def of(cls, num_prompt_tokens: int, max_new_tokens: int, adapter: str | None) -> RequestClass:
        return cls(adapter, length_class(num_prompt_tokens), length_class(max_new_tokens))


class _Lengths:
    """Answers of one class by length; those that were cut off are known only to be longer than that."""

    def __init__(self) -> None:
        self.ended: npt.NDArray[np.float64] = np.zeros(NUM_BUCKETS)
        self.cut_off: npt.NDArray[np.float64] = np.zeros(NUM_BUCKETS)
        self._num_seen = 0

    def note(self, num_tokens: int, *, ended: bool) -> None:
        (self.ended if ended else self.cut_off)[_bucket(num_tokens)] += 1
        self._num_seen += 1
        if self._num_seen % HALVE_EVERY == 0:
            self.ended /= 2
            self.cut_off /= 2

    @property
    def is_known(self) -> bool:
        return bool(self.ended.sum() >= MIN_ENDED)

    def quantile(self, produced: int) -> int | None:
        """Length that ``QUANTILE`` of the answers do not exceed that are longer than ``produced``; None: no idea.

        By the estimator of Kaplan and Meier (1958): an answer that was cut off counts for the lengths it has reached.
        """
        first = _bucket(produced)
        every = self.ended + self.cut_off
        at_risk = every[::-1].cumsum()[::-1][first:]
        if not at_risk[0]:
            return 2 * produced  # longer than any before
        ended = self.ended[first:]
        survival = np.cumprod(1.0 - np.divide(ended, at_risk, out=np.zeros_like(ended), where=at_risk > 0))
        enough = np.flatnonzero(survival <= 1.0 - QUANTILE + 1e-9)
        return int(_UPPER[first + int(enough[0])]) if len(enough) else None


class LengthEstimator:
    """Answers follow from requests that have ended only, so that all ranks estimate alike."""

    def __init__(self) -> None:
        self._classes: dict[RequestClass, _Lengths] = {}
        self._all = _Lengths()

    def note(self, kind: RequestClass, num_tokens: int, *, ended: bool) -> None:
        """A request is over.

        Args:
            kind: its class.
            num_tokens: length of its answer.
            ended: by itself; False if it was cut off, by ``max_tokens`` or by its client.
        """
        self._classes.setdefault(kind, _Lengths()).note(num_tokens, ended=ended)
        self._all.note(num_tokens, ended=ended)

    def total_tokens(self, kind: RequestClass, max_new_tokens: int, produced: int = 0) -> int:
        """Length of the whole answer to reserve for.

        Args:
            kind: class of the request.
            max_new_tokens: the cap.
            produced: tokens of it that exist already.

        Returns:
            More than ``produced``, at most ``max_new_tokens``.
        """
        lengths = self._classes.get(kind)
        if lengths is None or not lengths.is_known:
            lengths = self._all
        guess = lengths.quantile(produced) if lengths.is_known else UNKNOWN_TOKENS
        if guess is None:
            return max_new_tokens  # those seen so far were all cut off
        if guess <= produced:
            guess = 2 * produced
        return min(max_new_tokens, max(guess, produced + 1))


def _bucket(num_tokens: int) -> int:
    """Lengths at most a ninth apart share a bucket."""
    if num_tokens < 1:
        return 0
    return min(NUM_BUCKETS - 1, 1 + int(BUCKETS_PER_OCTAVE * np.log2(num_tokens)))


_UPPER = np.concatenate([[0], np.ceil(2.0 ** (np.arange(1, NUM_BUCKETS) / BUCKETS_PER_OCTAVE)) - 1]).astype(np.int64)
"""The longest length of each bucket."""
