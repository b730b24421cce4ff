"""The reference engine: one step is one pass through the list of stations."""

from __future__ import annotations

from typing import Any

from dflash2.cache.sequence import Sequence
from dflash2.engine.adapters import Adapters
from dflash2.engine.base import FinishReason, GenerationRequest, PrefetchReport, TokenOutput
from dflash2.engine.branches import Brancher, Branches, GapWatcher
from dflash2.engine.freed_memory import FreedMemory
from dflash2.engine.hints import Hints
from dflash2.engine.model_runner import ModelRunner
from dflash2.engine.request_state import RequestState
from dflash2.engine.scheduler import Scheduler
from dflash2.errors import QueueFull, RequestError
from dflash2.monitoring.latency import RequestLatencies
from dflash2.pipeline.adapter_file import AdapterSpec
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
        adapters: LoRA adapters that requests may name; None: the base model only.
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
        adapters: Adapters | None = None,
    ) -> None:
        self.runtime = runtime
        self.adapters = adapters
        self.max_context_tokens = max_context_tokens
        self._runner = runner
        self._scheduler = scheduler
        self._eos_token_ids = eos_token_ids
        self._vocab_size = vocab_size
        self._groups: dict[str, Branches] = {}
        self._brancher = Brancher(scheduler.fork, self._remove, self._groups)
        self._hints = Hints(runtime)
        self._latencies = RequestLatencies()
        self._freed_memory = FreedMemory()
        runtime.stats_of.update(scheduler=scheduler.stats, latency=self._latencies.as_dict, hints=self._hints.stats)
        if adapters is not None:
            runtime.stats_of["adapters"] = lambda: adapters.stats(runtime.clock())
        self._closed = False

    @property
    def on_gaps(self) -> GapWatcher | None:
        """Told, for each step, the requests sampled and how far the best logit of each was ahead of the second."""
        return self._brancher.on_gaps

    @on_gaps.setter
    def on_gaps(self, watcher: GapWatcher | None) -> None:
        self._brancher.on_gaps = watcher

    @property
    def max_resident_tokens(self) -> int:
        return min(self.max_context_tokens, self.runtime.ledger.largest * self.runtime.layout.block_size)

    @property
    def has_work(self) -> bool:
        return bool(self._groups)

    def add(self, request: GenerationRequest) -> None:
        sampling = request.sampling
        sampling.validate()
        if request.request_id in self._groups:
            raise RequestError(f"request id {request.request_id!r} is in use", param="request_id")
        _check_prompt(request.token_ids, self._vocab_size, self.max_context_tokens)
        adapter = self._adapter_named(request.adapter)
        num_prompt = len(request.token_ids)
        total = min(num_prompt + sampling.max_tokens, self.max_context_tokens)
        at_once, needed = self.runtime.promises.needed_blocks(num_prompt, total - num_prompt, sampling.num_branches)
        self.runtime.ledger.check_size(needed, at_once)
        deadline = self.runtime.clock() + self._scheduler.limits.admission_timeout_s
        state = RequestState(request, total, deadline)
        ends = frozenset(sampling.stop_token_ids)
        if self.adapters is None or adapter is None:
            self._scheduler.add(state)
        else:
            state.adapter_key = adapter.digest
            self.adapters.add(state, adapter, self.runtime.clock())
        self._groups[request.request_id] = Branches(state, ends if sampling.ignore_eos else ends | self._eos_token_ids)
        self._latencies.on_arrival(request.request_id, request.arrival_s)

    def cancel(self, request_id: str) -> None:
        group = self._groups.get(request_id)
        for state in [] if group is None else group.live:
            state.end_wanted = state.end_wanted or FinishReason.CANCELLED

    def end_answer(self, request_id: str, index: int) -> None:
        group = self._groups.get(request_id)
        if group is None or group.beams is not None:  # a beam is not an answer yet
            return
        for state in group.live:
            if state.index == index:
                state.end_wanted = state.end_wanted or FinishReason.STOP

    def prefetch(
        self, token_ids: IntArray, adapter: str | None, tenant_salt: str | None, ttl_s: float
    ) -> PrefetchReport:
        spec = self._adapter_named(adapter)
        return self._hints.expect(token_ids, None if spec is None else spec.digest, tenant_salt, ttl_s)

    def step(self) -> list[TokenOutput]:
        now = self.runtime.clock()
        self.runtime.poll()
        outputs = self._end_wanted() + self._end_expired(now) + self._admit_adapters(now)
        scheduled = self._scheduler.schedule(now)
        if scheduled is None:
            self.runtime.wait(WAIT_S)
        else:
            states, batch = scheduled
            self._latencies.on_step([state.request_id for state in states], now)
            logits = self._runner.run(batch)
            self._scheduler.note_step(self.runtime.clock() - now)
            wanting = [state for state, wants in zip(states, batch.wants_logits, strict=True) if wants]
            draws = self._brancher.draw(wanting, logits)
            broken = {draw.state for draw in draws if not draw.is_valid}
            self.runtime.complete_step(_computed(states, batch.query_lens, broken))
            outputs += self._brancher.apply(draws)
        self._note_latencies(outputs)
        self._rebalance()
        self._freed_memory.after_step(self.runtime.clock())
        return outputs

    def idle(self) -> None:
        if self.adapters is not None:
            self.adapters.cache.poll(self.runtime.clock())
        self._rebalance()
        self._freed_memory.while_idle(self.runtime.clock())

    def stats(self) -> dict[str, Any]:
        return self.runtime.stats()

    def check_integrity(self) -> None:
        """Raise IntegrityError if any invariant of the runtime is broken."""
        self.runtime.check_integrity()

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            for state in self._scheduler.every():
                self._scheduler.remove(state)
            self._hints.release_all()
            self._groups.clear()
            self.runtime.shutdown()  # first: it keeps what is worth keeping, whatever hangs elsewhere
            if self.adapters is not None:
                self.adapters.close()
            self._runner.close()

    def _rebalance(self) -> None:
        self._hints.expire(self.runtime.clock())
        leaving, upcoming = self._scheduler.leaving_next(), self._scheduler.upcoming()
        self.runtime.rebalance([state.blocks for state in leaving], [state.blocks for state in upcoming])

    def _note_latencies(self, outputs: list[TokenOutput]) -> None:
        now = self.runtime.clock()
        for output in outputs:
            if output.token_id is not None:
                self._latencies.on_token(output.request_id, output.index, now)
            if output.finish_reason is not None:
                self._latencies.on_branch_end(output.request_id, output.index, now)
            if output.ends_request:
                self._latencies.on_end(output.request_id)

    def _adapter_named(self, name: str | None) -> AdapterSpec | None:
        """Raises RequestError: there is no such adapter."""
        if name is None:
            return None
        if self.adapters is None:
            raise RequestError("this engine has no adapters", param="model")
        return self.adapters.spec_of(name)

    def _admit_adapters(self, now: float) -> list[TokenOutput]:
        """Requests whose adapter is ready go on to the scheduler; those that cannot are ended."""
        if self.adapters is None:
            return []
        ready, failed = self.adapters.take_ready(now)
        for state in ready:
            try:
                self._scheduler.add(state)
            except QueueFull as error:
                state.error = error
                state.adapter_slot = None  # it is not the scheduler's
                failed.append(state)
        return [self._brancher.end(state, FinishReason.ERROR) for state in failed]

    def _remove(self, state: RequestState, *, is_last: bool) -> None:
        """Take a branch out, wherever it is."""
        if self.adapters is not None and state.adapter_key is not None and state.adapter_slot is None:
            self.adapters.remove(state)
        else:
            if is_last and state.sequence is not None:
                self._hints.keep(state.request_id, state.request.hints, state.sequence, state.num_prompt_tokens)
            self._scheduler.remove(state)
        if is_last and self.adapters is not None:
            self.adapters.release(state.request_id)

    def _end_wanted(self) -> list[TokenOutput]:
        every = [state for group in self._groups.values() for state in group.live]
        return [self._brancher.end(state, state.end_wanted) for state in every if state.end_wanted is not None]

    def _end_expired(self, now: float) -> list[TokenOutput]:
        expired = self._scheduler.take_expired(now)
        if self.adapters is not None:
            without_adapter = self.adapters.take_expired(now)
            self._scheduler.counters.timed_out_requests += len(without_adapter)
            expired += without_adapter
        return [self._brancher.end(state, FinishReason.TIMEOUT) for state in expired]


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
