"""The reference engine: one step is one pass through the list of stations."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import torch

from dflash2.cache.sequence import Sequence
from dflash2.engine.base import FinishReason, GenerationRequest, TokenOutput
from dflash2.engine.model_runner import ModelRunner
from dflash2.engine.request_state import RequestState
from dflash2.engine.sampling import SampleResult, sample
from dflash2.engine.scheduler import Scheduler
from dflash2.errors import ModelError, RequestError
from dflash2.runtime import Runtime
from dflash2.types import IntArray

WAIT_S = 0.02
"""Longest wait for a load when no request can take part in a step; a completion ends it at once."""


class ReferenceEngine:
    """Continuous batching over a ``Runtime``; see ``engine.base.Engine`` for the contract of each method.

    Args:
        runtime: memory of this rank.
        runner: the model.
        scheduler: who takes part in a step.
        max_context_tokens: prompt and output of a request together.
        eos_token_ids: tokens that end an answer.
        vocab_size: token ids are below this.
    """

    def __init__(
        self,
        runtime: Runtime,
        runner: ModelRunner,
        scheduler: Scheduler,
        *,
        max_context_tokens: int,
        eos_token_ids: frozenset[int],
        vocab_size: int,
    ) -> None:
        self.runtime = runtime
        self.max_context_tokens = max_context_tokens
        self._runner = runner
        self._scheduler = scheduler
        self._eos_token_ids = eos_token_ids
        self._vocab_size = vocab_size
        self.on_gaps: Callable[[list[str], list[float]], None] | None = None
        """Told, for each step, the requests sampled and how far the best logit of each was ahead of the second."""
        self._states: dict[str, RequestState] = {}
        self._closed = False

    @property
    def has_work(self) -> bool:
        return bool(self._states)

    def add(self, request: GenerationRequest) -> None:
        request.sampling.validate()
        if request.request_id in self._states:
            raise RequestError(f"request id {request.request_id!r} is in use", param="request_id")
        _check_prompt(request.token_ids, self._vocab_size, self.max_context_tokens)
        total = min(len(request.token_ids) + request.sampling.max_tokens, self.max_context_tokens)
        self.runtime.ledger.check_size(self.runtime.cache.residency.blocks_for(total))
        deadline = self.runtime.clock() + self._scheduler.limits.admission_timeout_s
        state = RequestState(request, total, deadline)
        self._states[request.request_id] = state
        self._scheduler.waiting.append(state)

    def cancel(self, request_id: str) -> None:
        state = self._states.get(request_id)
        if state is not None:
            state.cancelled = True

    def step(self) -> list[TokenOutput]:
        now = self.runtime.clock()
        self.runtime.poll()
        outputs = self._end_cancelled() + self._end_expired(now)
        scheduled = self._scheduler.schedule(now)
        if scheduled is None:
            self.runtime.wait(WAIT_S)
        else:
            states, batch = scheduled
            logits = self._runner.run(batch)
            self._scheduler.note_step(self.runtime.clock() - now)
            wanting = [state for state, wants in zip(states, batch.wants_logits, strict=True) if wants]
            sampled = self._sample(wanting, logits)
            broken = {state for state, valid in zip(wanting, sampled.is_valid.tolist(), strict=True) if not valid}
            self.runtime.complete_step(_computed(states, batch.query_lens, broken))
            outputs += self._append(wanting, sampled)
        self._rebalance()
        return outputs

    def idle(self) -> None:
        self._rebalance()

    def stats(self) -> dict[str, Any]:
        scheduler = self._scheduler
        return {
            **self.runtime.stats(),
            "scheduler": {
                **asdict(scheduler.counters),
                "waiting_requests": len(scheduler.waiting),
                "paused_requests": len(scheduler.paused),
                "resident_requests": len(scheduler.resident),
            },
        }

    def check_integrity(self) -> None:
        """Raise IntegrityError if any invariant of the runtime is broken."""
        self.runtime.check_integrity()

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            for state in self._scheduler.every():
                self._scheduler.remove(state)
            self._states.clear()
            self.runtime.shutdown()

    def _rebalance(self) -> None:
        leaving, upcoming = self._scheduler.leaving_next(), self._scheduler.upcoming()
        self.runtime.rebalance([state.blocks for state in leaving], [state.blocks for state in upcoming])

    def _sample(self, states: list[RequestState], logits: torch.Tensor) -> SampleResult:
        result = sample(
            logits,
            [state.request.sampling for state in states],
            [state.seed for state in states],
            [state.num_output_tokens for state in states],
            with_gaps=self.on_gaps is not None,
        )
        if self.on_gaps is not None and result.gaps is not None:
            self.on_gaps([state.request_id for state in states], result.gaps.tolist())
        return result

    def _append(self, states: list[RequestState], sampled: SampleResult) -> list[TokenOutput]:
        outputs = []
        for state, token, valid in zip(states, sampled.token_ids.tolist(), sampled.is_valid.tolist(), strict=True):
            if not valid:
                state.error = ModelError("the model's logits are not finite; its weights or the dtype may be wrong")
                outputs.append(_output(state, None, FinishReason.ERROR))
                self._end(state)
                continue
            state.append(token)
            reason = self._finish_reason(state, token)
            outputs.append(_output(state, token, reason))
            if reason is not None:
                self._end(state)
        return outputs

    def _finish_reason(self, state: RequestState, token: int) -> FinishReason | None:
        sampling = state.request.sampling
        if token in sampling.stop_token_ids or (token in self._eos_token_ids and not sampling.ignore_eos):
            return FinishReason.STOP
        return FinishReason.LENGTH if state.num_tokens >= state.max_total_tokens else None

    def _end(self, state: RequestState) -> None:
        self._scheduler.remove(state)
        del self._states[state.request_id]

    def _end_cancelled(self) -> list[TokenOutput]:
        cancelled = [state for state in self._states.values() if state.cancelled]
        for state in cancelled:
            self._end(state)
        return [_output(state, None, FinishReason.CANCELLED) for state in cancelled]

    def _end_expired(self, now: float) -> list[TokenOutput]:
        expired = self._scheduler.take_expired(now)
        for state in expired:
            del self._states[state.request_id]
        return [_output(state, None, FinishReason.TIMEOUT) for state in expired]


def _check_prompt(token_ids: IntArray, vocab_size: int, max_context_tokens: int) -> None:
    """Raises RequestError: the prompt is empty, too long, or holds ids that the model does not have."""
    if len(token_ids) == 0:
        raise RequestError("the prompt is empty", param="prompt")
    if len(token_ids) >= max_context_tokens:
        raise RequestError(
            f"the prompt has {len(token_ids)} tokens; this model's context is {max_context_tokens} tokens and at least "
            "one must be left for the answer",
            param="prompt",
        )
    if int(token_ids.min()) < 0 or int(token_ids.max()) >= vocab_size:
        raise RequestError(f"token ids must lie in 0...{vocab_size - 1}", param="prompt")


def _computed(
    states: list[RequestState], counts: IntArray, broken: set[RequestState]
) -> list[tuple[Sequence, IntArray]]:
    """(sequence, tokens whose KV the step has written), without those whose KV must not be shared."""
    work = []
    for state, count in zip(states, counts.tolist(), strict=True):
        if state in broken:
            continue
        start = state.blocks.num_tokens
        work.append((state.blocks, state.tokens[start : start + count]))
    return work


def _output(state: RequestState, token: int | None, reason: FinishReason | None) -> TokenOutput:
    return TokenOutput(
        state.request_id, token, reason, state.num_prompt_tokens, state.num_cached_tokens, error=state.error
    )
