"""Blocks promised to requests in SGLang's prefill admission (R-4.1)."""

from __future__ import annotations

from collections.abc import Callable

from dflash2.pipeline.estimator import LengthEstimator, RequestClass
from dflash2.policy.base import Outcome
from dflash2.runtime import Runtime


class Promises:
    """Each request is promised blocks for its prompt and the answer it is expected to give, on all tiers together.

    Running requests give theirs back when they end, one request alone always fits, and where nobody runs a retracted
    one goes on with the promise that it has: so every wait ends. One that outgrows its estimate goes on as long as
    SGLang has pages for it; if not, SGLang retracts a request, which keeps its KV and its promise, and is promised more
    when it comes back.

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
        *,
        nobody_runs: bool,
    ) -> bool:
        """Promise what the request needs; a retracted one, which has a promise, is promised what it needs by now.

        Args:
            rid: the request.
            num_prompt, max_new: tokens of the prompt, and of the answer at most.
            produced: tokens of the answer that exist.
            adapter: LoRA adapter.
            on_any_rank: True on all ranks if it is given True on one; every rank must ask.
            nobody_runs: no promise will be given back by itself; a retracted request goes on with the one it has.

        Returns:
            False if all promises together would not fit the tiers of some rank. The request then has what it had:
            nothing, or its old promise, which covers the KV that was kept for it.
        """
        kind = self._classes.setdefault(rid, RequestClass.of(num_prompt, max_new, adapter))
        before = self._ledger.promised_to(rid) if self._ledger.holds(rid) else None
        if before is not None and not produced:
            return True
        total = num_prompt + self._lengths.total_tokens(kind, max_new, produced)
        wanted = min(self._layout.num_blocks(total), self._ledger.largest)  # SGLang has its own limit
        ask = self._ledger.try_reserve if before is None else self._ledger.try_extend
        given = ask(rid, wanted)
        if on_any_rank(not given):
            if before is None:
                self.take_back(rid)
            else:
                self._ledger.give_back(rid, before)
            self._counters.reservations_refused += 1
            return before is not None and nobody_runs
        self._ledger.give_back(rid, wanted)
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
