"""What a request's logits lead to: the next tokens of its branches, forks, and their ends."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from dflash2.engine.base import FinishReason, TokenLogprobs, TokenOutput
from dflash2.engine.beam import Beam, BeamSearch, Candidates, Hypothesis
from dflash2.engine.logprobs import candidates, token_logprobs
from dflash2.engine.request_state import RequestState
from dflash2.engine.sampling import SampleResult, branch_seed, sample
from dflash2.errors import ModelError

GapWatcher = Callable[[list[str], list[float]], None]
Fork = Callable[[RequestState, int], RequestState]


class Remove(Protocol):
    """Takes a branch out of the engine."""

    def __call__(self, state: RequestState, *, is_last: bool) -> None: ...


class Branches:
    """All branches of one request.

    Args:
        first: the one that computes the prompt.
        end_token_ids: tokens that end an answer.
    """

    def __init__(self, first: RequestState, end_token_ids: frozenset[int]) -> None:
        sampling = first.request.sampling
        self.live = [first]
        self.end_token_ids = end_token_ids
        self.num_begun = 1
        """Branches that there have been so far: the index of the next one."""
        self.beams: BeamSearch | None = None
        if sampling.beam_width is not None:
            max_tokens = first.max_total_tokens - first.num_prompt_tokens
            self.beams = BeamSearch(sampling.beam_width, max_tokens, sampling.length_penalty, end_token_ids)
        self.scores: dict[RequestState, float] = {first: 0.0}
        """Of beams: sum of log-probabilities."""
        self.candidates: dict[RequestState, Candidates] = {}
        """Of beams that wait for the others of this step."""

    @property
    def has_forked(self) -> bool:
        return self.num_begun > 1


@dataclass(frozen=True, slots=True)
class Draw:
    """Tokens for one state that has logits: one, or one for each branch that it is about to become."""

    state: RequestState
    token_ids: list[int]
    logprobs: list[TokenLogprobs | None]
    is_valid: bool


class Brancher:
    """Carries on what a step has computed.

    ``draw`` is called before the step's KV is published, so that broken logits publish nothing; ``apply`` after it, so
    that a fork has all of its past.

    Args:
        fork: a second branch of a state, with the given index.
        remove: takes a branch out of the engine and is told whether it was the request's last.
        groups: all requests of the engine, by id; requests that end are taken out.
    """

    def __init__(self, fork: Fork, remove: Remove, groups: dict[str, Branches]) -> None:
        self._fork_state = fork
        self._remove = remove
        self._groups = groups
        self.on_gaps: GapWatcher | None = None

    def draw(self, states: list[RequestState], logits: torch.Tensor) -> list[Draw]:
        """Choose tokens, or for beams note the likeliest ones.

        Args:
            states: R branches.
            logits: float32 ``[R, V]``.
        """
        rows = [row for row, state in enumerate(states) for _ in range(self._num_draws(state))]
        drawing = [states[row] for row in rows]
        nth = [n for state in states for n in range(self._num_draws(state))]
        spread = logits if len(rows) == len(states) else logits[rows]
        sampled = sample(
            spread,
            [state.request.sampling for state in drawing],
            [branch_seed(state.seed, n) for state, n in zip(drawing, nth, strict=True)],
            [state.num_output_tokens for state in drawing],
            with_gaps=self.on_gaps is not None,
        )
        self._tell_gaps(drawing, sampled)
        tokens = sampled.token_ids.tolist()
        told = token_logprobs(spread, tokens, [state.request.sampling.logprobs for state in drawing])
        draws, first = [], 0
        for row, state in enumerate(states):
            span = slice(first, first + self._num_draws(state))
            first = span.stop
            valid = bool(np.all(sampled.is_valid[span]))
            draws.append(Draw(state, tokens[span], told[span], valid))
            beams = self._groups[state.request_id].beams
            if beams is not None and valid:
                self._groups[state.request_id].candidates[state] = candidates(logits[row], beams.num_candidates)
        return draws

    def apply(self, draws: list[Draw]) -> list[TokenOutput]:
        """Append, fork, select, end."""
        outputs: list[TokenOutput] = []
        for one in draws:
            group = self._groups.get(one.state.request_id)
            if group is None:
                continue  # another branch of it has broken in this step
            if not one.is_valid:
                outputs += self._break(group, one.state)
            elif group.beams is not None:
                outputs += self._advance_beams(group, group.beams)
            else:
                outputs += self._append(group, one)
        return outputs

    def end(self, state: RequestState, reason: FinishReason) -> TokenOutput:
        """Take a branch out; with the last one the request is over."""
        state.finish_reason = reason
        self._leave(state)
        return _output(state, None, reason, more_to_come=state.request_id in self._groups)

    def _num_draws(self, state: RequestState) -> int:
        """A request with several answers draws the first token of each from the logits of its prompt."""
        group = self._groups[state.request_id]
        return 1 if group.has_forked or group.beams is not None else state.request.sampling.n

    def _append(self, group: Branches, one: Draw) -> list[TokenOutput]:
        state = one.state
        # Forks come before the first token is appended: it is the only one that they do not share.
        branches = [state, *(self._fork(group, state) for _ in one.token_ids[1:])]
        outputs = []
        for branch, token, told in zip(branches, one.token_ids, one.logprobs, strict=True):
            branch.append(token)
            reason = _finish_reason(group, branch, token)
            if reason is not None:
                branch.finish_reason = reason
                self._leave(branch)
            more = reason is not None and branch.request_id in self._groups
            outputs.append(_output(branch, token, reason, more_to_come=more, logprobs=told))
        return outputs

    def _fork(self, group: Branches, state: RequestState) -> RequestState:
        twin = self._fork_state(state, group.num_begun)
        group.num_begun += 1
        group.live.append(twin)
        return twin

    def _advance_beams(self, group: Branches, search: BeamSearch) -> list[TokenOutput]:
        """Once every beam has its logits: one token further, or the end."""
        live = list(group.live)
        if any(state not in group.candidates for state in live):
            return []
        beams = [
            Beam(tuple(s.tokens[s.num_prompt_tokens :].tolist()), group.scores[s], group.candidates[s]) for s in live
        ]
        group.candidates.clear()
        continuations = search.advance(beams)
        if not continuations:
            return self._end_beams(group, search.best(live[0].request.sampling.n))
        children: dict[RequestState, list[tuple[int, float]]] = {state: [] for state in live}
        for one in continuations:
            children[live[one.parent]].append((one.token_id, one.score))
        for state, tokens in children.items():
            branches = [state, *(self._fork(group, state) for _ in tokens[1:])]
            for branch, (token, score) in zip(branches, tokens, strict=False):
                branch.append(token)
                group.scores[branch] = score
        for state, tokens in children.items():
            if not tokens:
                self._leave(state)
        return []

    def _end_beams(self, group: Branches, answers: list[Hypothesis]) -> list[TokenOutput]:
        state = group.live[0]
        for branch in list(group.live):
            self._leave(branch)
        outputs = []
        for index, answer in enumerate(answers):
            for position, token in enumerate(answer.token_ids):
                reason = answer.reason if position == len(answer.token_ids) - 1 else None
                more = reason is not None and index < len(answers) - 1
                outputs.append(_output(state, token, reason, more_to_come=more, index=index))
        return outputs

    def _break(self, group: Branches, state: RequestState) -> list[TokenOutput]:
        """Logits that are not finite end a branch; beams, which depend on each other, all end."""
        broken = list(group.live) if group.beams is not None else [state]
        outputs = []
        for branch in broken:
            branch.error = ModelError("the model's logits are not finite; its weights or the dtype may be wrong")
            outputs.append(self.end(branch, FinishReason.ERROR))
        return outputs

    def _leave(self, state: RequestState) -> None:
        group = self._groups[state.request_id]
        group.live.remove(state)
        self._remove(state, is_last=not group.live)
        group.candidates.pop(state, None)
        group.scores.pop(state, None)
        if not group.live:
            del self._groups[state.request_id]

    def _tell_gaps(self, states: list[RequestState], sampled: SampleResult) -> None:
        if self.on_gaps is not None and sampled.gaps is not None:
            self.on_gaps([state.request_id for state in states], sampled.gaps.tolist())


def _finish_reason(group: Branches, state: RequestState, token: int) -> FinishReason | None:
    if token in group.end_token_ids:
        return FinishReason.STOP
    return FinishReason.LENGTH if state.num_tokens >= state.max_total_tokens else None


def _output(
    state: RequestState,
    token: int | None,
    reason: FinishReason | None,
    *,
    more_to_come: bool = False,
    index: int | None = None,
    logprobs: TokenLogprobs | None = None,
) -> TokenOutput:
    return TokenOutput(
        state.request_id,
        token,
        reason,
        state.num_prompt_tokens,
        state.num_cached_tokens,
        error=state.error,
        index=state.index if index is None else index,
        more_to_come=more_to_come,
        logprobs=logprobs,
    )
