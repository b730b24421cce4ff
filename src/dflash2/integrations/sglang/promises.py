"""Blocks promised to requests in SGLang's prefill admission (R-4.1)."""

from __future__ import annotations

from collections.abc import Callable

from dflash2.pipeline.estimator import LengthEstimator, RequestClass
from dflash2.policy.base import Outcome
from dflash2.runtime import Runtime


class Promises:
    """Each request is promised blocks for its prompt and the answer it is expected to give, on all tiers together.

    Running requests give theirs back when they end, and one request alone always fits, so every wait ends. One that
    outgrows its estimate goes on as long as SGLang has pages for it; if not, SGLang retracts a request, which keeps its
    KV, and is promised more when it comes back.

    All ranks promise alike: what one of them cannot, because its disk has lost slots, none of them does.

    Args:
        runtime: whose ledger and counters are used.
    """

    def __init__(self, runtime: Runtime) -> None:
        self._ledger = runtime.ledger
        self._counters = runtime.cache.counters
        self._layout = runtime.layout
        self._lengths = LengthEstimator()
        self._classes: dict[str, RequestClass] = {}

    def try_give(
        self,
        rid: str,
        num_prompt: int,
        max_new: int,
        produced: int,
        adapter: str | None,
        on_any_rank: Callable[[bool], bool],
    ) -> bool:
        """Promise what the request needs; one that has a promise for as many tokens as it has by now keeps it.

        Args:
            rid: the request.
            num_prompt, max_new: tokens of the prompt, and of the answer at most.
            produced: tokens of the answer that exist.
            adapter: LoRA adapter.
            on_any_rank: True on all ranks if it is given True on one; every rank must ask.

        Returns:
            False, and nothing promised, if all promises together would not fit the tiers of some rank.
        """
        kind = self._classes.setdefault(rid, RequestClass.of(num_prompt, max_new, adapter))
        if self._ledger.holds(rid) and not produced:
            return True
        self.take_back(rid)
        total = num_prompt + self._lengths.total_tokens(kind, max_new, produced)
        wanted = min(self._layout.num_blocks(total), self._ledger.largest)  # SGLang has its own limit
        given = self._ledger.try_reserve(rid, wanted)
        if on_any_rank(not given):
            self.take_back(rid)
            self._counters.reservations_refused += 1
            return False
        self._counters.reservations += 1
        return True

    def take_back(self, rid: str) -> None:
        """The request was not admitted after all."""
        if self._ledger.holds(rid):
            self._ledger.release(rid)

    def ended(self, rid: str, outcome: Outcome | None) -> None:
        """The request is over; None: it was aborted. Unknown ones are ignored."""
        self.take_back(rid)
        kind = self._classes.pop(rid, None)
        if kind is not None and outcome is not None:
            self._lengths.note(kind, outcome.num_output_tokens, ended=outcome.stop_reason != "length")
