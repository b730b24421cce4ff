"""One request inside the engine, from arrival to its last token."""

from __future__ import annotations

import numpy as np

from dflash2.cache.sequence import Sequence
from dflash2.engine.base import GenerationRequest
from dflash2.engine.sampling import resolve_seed
from dflash2.types import IntArray


class RequestState:
    """A request, its tokens so far, and its blocks once it is admitted.

    Args:
        request: as the front end gave it.
        max_total_tokens: prompt plus output at most.
        deadline_s: latest time of admission, on the engine's clock.
    """

    def __init__(self, request: GenerationRequest, max_total_tokens: int, deadline_s: float) -> None:
        self.request = request
        self.deadline_s = deadline_s
        self.seed = resolve_seed(request.sampling)
        self.max_total_tokens = max_total_tokens
        self.num_prompt_tokens = len(request.token_ids)
        self.num_tokens = self.num_prompt_tokens
        self._tokens: IntArray = np.empty(max_total_tokens, np.int32)
        self._tokens[: self.num_tokens] = request.token_ids
        self.sequence: Sequence | None = None
        self.admitted = False
        """It has been admitted once: from then on it cannot expire, dropped for a while or not."""
        self.gave_up_loads = False
        """A load took too long once: it computes the rest itself and takes over no cached block again."""
        self.num_cached_tokens = 0
        self.turn_tokens = 0
        """Tokens produced since it last became resident."""
        self.cancelled = False
        self.error: Exception | None = None

    @property
    def request_id(self) -> str:
        return self.request.request_id

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
        """Tokens whose KV has to be computed before the next one can be sampled; 1 when decoding."""
        return self.num_tokens - self.blocks.num_tokens

    @property
    def is_prefilling(self) -> bool:
        return self.num_uncomputed > 1

    def append(self, token_id: int) -> None:
        self._tokens[self.num_tokens] = token_id
        self.num_tokens += 1
        self.turn_tokens += 1
