"""One request inside the engine, from arrival to its last token."""

from __future__ import annotations

import numpy as np

from dflash2.cache.admission import WaitReason
from dflash2.cache.sequence import Sequence
from dflash2.engine.base import FinishReason, GenerationRequest
from dflash2.engine.sampling import branch_seed, resolve_seed
from dflash2.policy.base import Outcome, RequestTraits
from dflash2.types import IntArray


class RequestState:
    """One branch of a request, its tokens so far, and its blocks once it is admitted.

    A request with several answers, or with beams, is one branch until its prompt is computed and forks then.

    Args:
        request: as the front end gave it.
        max_total_tokens: prompt plus output at most.
        deadline_s: latest time of admission, on the engine's clock.
        index: which branch it is; the first is 0.
    """

    def __init__(self, request: GenerationRequest, max_total_tokens: int, deadline_s: float, index: int = 0) -> None:
        self.request = request
        self.index = index
        self.adapter_key: str | None = None
        """Identity of its adapter's weights; None for the base model."""
        self.adapter_slot: int | None = None
        """Where the adapter's weights are on the device; None for the base model."""
        self.deadline_s = deadline_s
        self.arrived_s = deadline_s
        """When it came to the scheduler, on the engine's clock; written there."""
        self.seed = branch_seed(resolve_seed(request.sampling), index)
        self.max_total_tokens = max_total_tokens
        self.num_prompt_tokens = len(request.token_ids)
        self.num_tokens = self.num_prompt_tokens
        self._tokens = _own_tokens(request, max_total_tokens)
        self.sequence: Sequence | None = None
        self.admitted = False
        """It has been admitted once: from then on it cannot expire, dropped for a while or not."""
        self.order = 0
        """Which admission of the scheduler it was; all branches of a request have the same."""
        self.gave_up_loads = False
        """A load took too long once: it computes the rest itself and takes over no cached block again."""
        self.num_cached_tokens = 0
        self.turn_tokens = 0
        """Tokens produced since it last became resident."""
        self.end_wanted: FinishReason | None = None
        """How it ends at the next step, where somebody asked for that."""
        self.error: Exception | None = None
        self.finish_reason: FinishReason | None = None
        """How it ended, once it has; beams end without."""
        self.size_tokens = max_total_tokens
        """How long it is expected to become; decides its place in the line."""
        self.overtaken_tokens = 0
        """Size of those that came later and went ahead of it."""
        self.is_small = False
        """It may use the part of HBM that is left to small requests."""
        self.turn_is_over = False
        """It is paused after a whole turn, not before its first or in the middle of one."""
        self.takes_turns = False
        """Smoothing has let it in among those that share HBM by turns."""
        self.is_held_back = False
        """It is paused, and smoothing does not let it displace anybody yet."""
        self.paused_s = 0.0
        """Since when it is paused, on the engine's clock."""
        self.promised_tokens = 0
        """Prompt and answer that its reservation covers."""
        self.was_extended = False
        self.was_dropped = False
        """Its blocks were given up once so that others could go on; from then on it is reserved whole."""
        self.waits_for_growth = False
        """Its reservation is used up and cannot be extended yet."""
        self.wait_reason = WaitReason.QUEUED
        self.admitted_s: float | None = None
        """When it was admitted, until it takes part in a step."""

    @property
    def request_id(self) -> str:
        return self.request.request_id

    @property
    def sequence_id(self) -> str:
        """Name of its sequence: the request's own for the first branch."""
        return branch_id(self.request_id, self.index)

    @property
    def priority(self) -> int:
        """Smaller goes first."""
        return self.request.hints.priority

    @property
    def num_branches(self) -> int:
        return self.request.sampling.num_branches

    @property
    def buffer(self) -> IntArray:
        """int32 ``[max_total_tokens]``: the memory in which its tokens stand and will stand."""
        return self._tokens

    @property
    def traits(self) -> RequestTraits:
        """What the placement policy is told of it."""
        return RequestTraits(
            session=self.request.hints.session_id,
            num_prompt_tokens=self.num_prompt_tokens,
            beam_width=self.request.sampling.beam_width or 1,
        )

    @property
    def outcome(self) -> Outcome | None:
        """What the placement policy is told when it has ended."""
        if self.finish_reason is None:
            return None
        return Outcome(self.finish_reason.value, self.num_output_tokens)

    def fork(self, index: int, sequence: Sequence | None) -> RequestState:
        """A branch with the same past.

        Args:
            index: of the new branch, not used by another one of this request.
            sequence: its fork of this one's blocks; None if this one was dropped.
        """
        twin = RequestState(self.request, self.max_total_tokens, self.deadline_s, index)
        twin.seed = branch_seed(self.seed, index)
        twin.adapter_key, twin.adapter_slot = self.adapter_key, self.adapter_slot
        twin._tokens[: self.num_tokens] = self.tokens
        twin.num_tokens = self.num_tokens
        twin.sequence = sequence
        twin.admitted = True
        twin.order = self.order
        twin.promised_tokens = self.promised_tokens
        twin.num_cached_tokens = self.num_cached_tokens
        twin.turn_tokens = self.turn_tokens
        return twin

    @property
    def blocks(self) -> Sequence:
        """Its sequence; only for admitted requests."""
        assert self.sequence is not None
        return self.sequence

    @property
    def tokens(self) -> IntArray:
        """int32 ``[num_tokens]``, a view: prompt and output."""
        return self._tokens[: self.num_tokens]

    @property
    def num_output_tokens(self) -> int:
        return self.num_tokens - self.num_prompt_tokens

    @property
    def num_uncomputed(self) -> int:
        """Tokens whose KV has to be computed before the next one can be sampled; 1 when decoding.

        0 for a beam that waits for the others of its request.
        """
        return self.num_tokens - self.blocks.num_tokens

    @property
    def is_prefilling(self) -> bool:
        return self.num_uncomputed > 1

    def append(self, token_id: int) -> None:
        self._tokens[self.num_tokens] = token_id
        self.num_tokens += 1
        self.turn_tokens += 1


def _own_tokens(request: GenerationRequest, max_total_tokens: int) -> IntArray:
    """Where the request's tokens stand: its place in the ring if it has one that no other branch writes to."""
    lent = None if request.span is None else request.span.try_lend()
    if lent is not None and len(lent) >= max_total_tokens:
        return lent[:max_total_tokens]
    tokens = np.empty(max_total_tokens, np.int32)
    tokens[: len(request.token_ids)] = request.token_ids
    return tokens


def branch_id(request_id: str, index: int) -> str:
    """Name of a branch's sequence."""
    return request_id if index == 0 else f"{request_id}.{index}"
