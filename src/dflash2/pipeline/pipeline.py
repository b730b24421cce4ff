"""DSpark's front end: a request goes through these stages beside the model, and reaches the engine ready to run."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from dflash2.errors import QueueFull, RequestTooLarge
from dflash2.pipeline.handoff import TokenIds, TokenRing, TokenSpan
from dflash2.pipeline.stages import Stage
from dflash2.pipeline.tokenise_stage import MAX_BATCH, TokeniseStage
from dflash2.pipeline.tokenizer import Tokenizer

VALIDATING_AT_ONCE = 2
"""Chats rendered at a time: a template is Python and holds the GIL."""


@dataclass(frozen=True, slots=True)
class TextPrompt:
    """A text to tokenise, or what makes one.

    Attributes:
        text: the text, or a function that renders it; called in a thread.
        num_chars: about how long it is, if it is not rendered yet.
        add_special_tokens: off for rendered chats, whose template writes them.
    """

    text: str | Callable[[], str]
    num_chars: int
    add_special_tokens: bool


@dataclass(frozen=True, slots=True)
class GivenTokens:
    """A prompt that the client tokenised itself."""

    ids: list[int]

    def __len__(self) -> int:
        return len(self.ids)


class Pipeline:
    """Validate, tokenise, hand over; all requests at once, each stage with its own queue.

    A request is a coroutine: cancelling it leaves whatever stage it is in and gives back what it holds. Plain asyncio
    and the tokenizer's threads.

    Args:
        tokenizer: not owned.
        ring: where the token ids go.
        ring_timeout_s: so long a prompt may wait for room there.
        max_prompt_tokens: a text that must have more is refused before it is tokenised, which takes a hundred bytes
            of memory and more for each token.
        enabled: False tokenises one request after the other, as engines do without a pipeline.
        max_requests: requests in these stages; more are refused.
        engine_busy_s: seconds that the model has been running so far, to tell what is hidden behind it.
        clock: seconds.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        ring: TokenRing,
        *,
        ring_timeout_s: float,
        max_prompt_tokens: int,
        enabled: bool = True,
        max_requests: int = 1024,
        engine_busy_s: Callable[[], float] = lambda: 0.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.enabled = enabled
        self.ring = ring
        self._ring_timeout_s = ring_timeout_s
        self._max_prompt_tokens = max_prompt_tokens
        self._tokenizer = tokenizer
        self._max_requests = max_requests
        self._num_requests = 0
        self._validate = Stage(VALIDATING_AT_ONCE if enabled else 1, engine_busy_s, clock)
        self._tokenise = TokeniseStage(tokenizer, MAX_BATCH if enabled else 1, engine_busy_s, clock)

    async def prepare(
        self,
        prompt: TextPrompt | list[int],
        output_room: Callable[[int], int],
    ) -> TokenSpan:
        """Take a request through all stages.

        Args:
            prompt: text, or token ids.
            output_room: from the number of prompt tokens to the most tokens that may follow; raises for a prompt that
                cannot be served.

        Returns:
            Its place in the ring; the caller gives it to the engine or releases it.

        Raises:
            QueueFull: too many requests are in these stages.
            RequestTooLarge: the text has more than ``max_prompt_tokens`` whatever it says, or see ``TokenRing.put``.
            DeadlineExceeded: see ``TokenRing.put``.
            Exception: what ``output_room`` or a template raised.
        """
        if self._num_requests >= self._max_requests:
            raise QueueFull(f"{self._num_requests} requests are being prepared already; come back later")
        self._num_requests += 1
        try:
            tokens = await self._token_ids(prompt)
            return await self.ring.put(tokens, output_room(len(tokens)), self._ring_timeout_s)
        finally:
            self._num_requests -= 1

    def stats(self) -> dict[str, Any]:
        """JSON-able."""
        return {
            "enabled": self.enabled,
            "preparing_requests": self._num_requests,
            "stages": {
                "validate": self._validate.meter.as_dict(),
                "tokenise": self._tokenise.meter.as_dict(),
            },
            "ring": self.ring.stats(),
        }

    async def _token_ids(self, prompt: TextPrompt | list[int]) -> TokenIds:
        if not isinstance(prompt, TextPrompt):
            return GivenTokens(prompt)
        async with self._validate.place():
            if isinstance(prompt.text, str):
                text = prompt.text
            else:
                text = await self._tokenizer.run(prompt.text, prompt.num_chars)
            fewest = self._tokenizer.fewest_tokens(text)
            if fewest > self._max_prompt_tokens:
                raise RequestTooLarge(
                    f"the prompt has {len(text)} characters, which is at least {fewest} tokens; this model takes "
                    f"prompts of {self._max_prompt_tokens}"
                )
        return await self._tokenise.encode(text, add_special_tokens=prompt.add_special_tokens)
