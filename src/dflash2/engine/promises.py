"""What is reserved for each request, and its correction while the request runs (R-4.1)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from dflash2.engine.base import FinishReason
from dflash2.engine.request_state import RequestState
from dflash2.pipeline.estimator import LengthEstimator, RequestClass
from dflash2.runtime import Runtime

Reserve = Literal["estimate", "max_tokens", "prompt"]


@dataclass(slots=True)
class PromiseCounters:
    """How good the estimates were."""

    overestimated_requests: int = 0
    """Requests that ended with a block or more of their reservation unused."""
    underestimated_requests: int = 0
    """Requests whose reservation had to grow."""
    extended_blocks: int = 0
    given_back_blocks: int = 0
    """By running requests; what a request holds at its end is not counted."""


class Promises:
    """Decides how many tokens a reservation covers.

    Args:
        runtime: has the ledger.
        reserve: "estimate" for a quantile of what such requests have needed, "max_tokens" for the most they may need,
            "prompt" for no more than they have, as engines without reservations do.
    """

    def __init__(self, runtime: Runtime, reserve: Reserve) -> None:
        self._runtime = runtime
        self._reserve = reserve
        self.estimator = LengthEstimator()
        self.counters = PromiseCounters()

    @staticmethod
    def kind_of(state: RequestState) -> RequestClass:
        """Which requests it is compared with."""
        limit = state.max_total_tokens - state.num_prompt_tokens
        return RequestClass.of(state.num_prompt_tokens, limit, state.adapter_key)

    def total_tokens(self, state: RequestState) -> int:
        """Prompt and answer that a reservation of the request should cover, given what it has produced already."""
        if self._reserve == "max_tokens" or state.num_branches > 1 or state.was_dropped:
            return state.max_total_tokens
        if self._reserve == "prompt":
            return min(state.num_tokens + 1, state.max_total_tokens)
        cap = state.max_total_tokens - state.num_prompt_tokens
        produced = min(state.num_output_tokens, cap - 1)
        return state.num_prompt_tokens + self.estimator.total_tokens(self.kind_of(state), cap, produced)

    def try_cover(self, state: RequestState, num_tokens: int) -> bool:
        """Extend the request's reservation before it needs so many tokens.

        Returns:
            False, and no change, if the tiers have promised everything to others.
        """
        if num_tokens <= state.promised_tokens:
            return True
        wanted = max(num_tokens, self.total_tokens(state))
        for total in (wanted, num_tokens):  # what it will need, or at least what it needs now
            more = self._runtime.promises.try_extend(state.blocks, total)
            if more is not None:
                state.promised_tokens = total
                if more:  # not only further tokens of a block that was reserved whole
                    self.counters.underestimated_requests += int(not state.was_extended)
                    self.counters.extended_blocks += more
                    state.was_extended = True
                return True
        return False

    def give_back(self, states: Iterable[RequestState]) -> int:
        """Lower reservations to what is estimated now, with what was learned since.

        Returns:
            Blocks given back.
        """
        blocks = 0
        for state in states:
            total = max(self.total_tokens(state), state.num_tokens + 1)
            if total < state.promised_tokens:
                blocks += self._runtime.promises.give_back(state.blocks, total)
                state.promised_tokens = total
        self.counters.given_back_blocks += blocks
        return blocks

    def note_end(self, state: RequestState) -> None:
        """A request that was admitted is over, however it ended."""
        blocks_for = self._runtime.layout.num_blocks
        if blocks_for(state.promised_tokens) > blocks_for(state.num_tokens):
            self.counters.overestimated_requests += 1
        if state.num_branches == 1:
            whole = state.end_wanted is not FinishReason.CANCELLED and state.error is None
            ended = whole and state.num_tokens < state.max_total_tokens
            self.estimator.note(self.kind_of(state), state.num_output_tokens, ended=ended)
