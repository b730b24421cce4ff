"""From a checked request to a stream of text: tokenise, ask the engine, detokenise, watch for stop strings."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass

import numpy as np

from dflash2.engine.async_engine import AsyncEngine
from dflash2.engine.base import FinishReason, GenerationRequest
from dflash2.engine.sampling import SamplingParams
from dflash2.pipeline.chat import ChatRenderer
from dflash2.pipeline.detokenizer import CONTEXT_TOKENS, IncrementalDetokenizer, StopStrings
from dflash2.pipeline.tokenizer import Tokenizer
from dflash2.server.errors import ApiError, from_output
from dflash2.server.schema import ChatBody, CompletionBody, GenerationBody
from dflash2.types import IntArray

DEFAULT_COMPLETION_TOKENS = 16
"""As in OpenAI's API. Chats may use what the context leaves."""


@dataclass(frozen=True, slots=True)
class TextDelta:
    """New text of one choice.

    Attributes:
        index: which choice.
        text: whole characters, stop strings removed; empty only together with ``finish_reason``.
        finish_reason: ``stop`` or ``length`` on the last delta.
        num_output_tokens: generated up to here, the stop token included.
    """

    index: int
    text: str
    finish_reason: str | None
    num_prompt_tokens: int
    num_cached_tokens: int
    num_output_tokens: int


TextStream = AsyncGenerator[TextDelta, None]


class Frontend:
    """What stands between HTTP and the engine.

    Args:
        engine: started.
        tokenizer: the model's.
        chat: renders messages with the model's template.
    """

    def __init__(self, engine: AsyncEngine, tokenizer: Tokenizer, chat: ChatRenderer) -> None:
        self._engine = engine
        self._tokenizer = tokenizer
        self._chat = chat

    async def chat_requests(self, body: ChatBody, request_id: str, arrival_s: float) -> list[GenerationRequest]:
        """The one engine request of a chat.

        Raises:
            RequestError, ApiError: the messages cannot be rendered or are too long.
        """
        num_chars = sum(len(str(message.get("content", ""))) for message in body.messages)
        text = await self._tokenizer.run(lambda: self._chat.render(body.messages), num_chars)
        token_ids = await self._tokenizer.encode_async(text, add_special_tokens=False)
        return [self._request(token_ids, body, body.output_limit, request_id, arrival_s, "messages")]

    async def completion_requests(
        self, body: CompletionBody, request_id: str, arrival_s: float
    ) -> list[GenerationRequest]:
        """One engine request for each prompt.

        Raises:
            ApiError: a prompt is empty, too long, or has a token id that does not exist.
        """
        limit = body.output_limit or DEFAULT_COMPLETION_TOKENS
        prompts = [await self._prompt_ids(prompt) for prompt in body.prompts]
        return [
            self._request(token_ids, body, limit, f"{request_id}-{index}", arrival_s, "prompt")
            for index, token_ids in enumerate(prompts)
        ]

    def stream(self, requests: Sequence[GenerationRequest], stops: Sequence[str]) -> TextStream:
        """The text of all requests as it comes; closing it cancels what still runs.

        Raises (while iterating):
            DFlash2Error, ApiError: a request was refused or failed; the others are cancelled.
        """
        return merge([self._text(index, request, stops) for index, request in enumerate(requests)])

    async def _prompt_ids(self, prompt: str | list[int]) -> IntArray:
        if isinstance(prompt, str):
            return await self._tokenizer.encode_async(prompt, add_special_tokens=True)
        vocab_size = self._tokenizer.vocab_size
        wrong = next((token_id for token_id in prompt if not 0 <= token_id < vocab_size), None)
        if wrong is not None:
            raise ApiError(400, f"token id {wrong} is not in 0..{vocab_size - 1}", param="prompt")
        return np.asarray(prompt, dtype=np.int32)

    def _request(
        self,
        token_ids: IntArray,
        body: GenerationBody,
        limit: int | None,
        request_id: str,
        arrival_s: float,
        param: str,
    ) -> GenerationRequest:
        num_prompt = len(token_ids)
        if num_prompt == 0:
            raise ApiError(400, "the prompt has no tokens", param=param)
        context = self._engine.max_context_tokens
        max_tokens = max(1, context - num_prompt) if limit is None else limit
        if num_prompt + max_tokens > context:
            raise ApiError(
                400,
                f"this model's context is {context} tokens, but {num_prompt + max_tokens} were requested "
                f"({num_prompt} in the {param}, {max_tokens} for the output)",
                param=param,
                code="context_length_exceeded",
            )
        sampling = SamplingParams(
            max_tokens=max_tokens,
            temperature=1.0 if body.temperature is None else body.temperature,
            top_p=1.0 if body.top_p is None else body.top_p,
            top_k=body.top_k if body.top_k is not None and body.top_k > 0 else None,
            stop_token_ids=tuple(body.stop_token_ids or ()),
            ignore_eos=bool(body.ignore_eos),
            seed=body.seed,
        )
        return GenerationRequest(request_id, token_ids, sampling, arrival_s, tenant_salt=body.cache_salt)

    async def _text(self, index: int, request: GenerationRequest, stops: Sequence[str]) -> TextStream:
        """Text of one request. A stop string ends it by closing the engine's stream, which cancels the request."""
        detokenizer = IncrementalDetokenizer(self._tokenizer.decode, request.token_ids[-CONTEXT_TOKENS:].tolist())
        matcher = StopStrings(stops)
        num_output = 0
        async with aclosing(self._engine.generate(request)) as outputs:
            async for output in outputs:
                failure = from_output(output)
                if failure is not None:
                    raise failure
                ended = output.finish_reason is not None
                text = ""
                if output.token_id is not None:
                    num_output += 1
                    # The token that stops the output is not part of it.
                    if output.finish_reason is not FinishReason.STOP:
                        text = detokenizer.push(output.token_id)
                text, stopped = matcher.push(text + detokenizer.flush() if ended else text)
                if ended and not stopped:
                    text += matcher.flush()
                reason = "stop" if stopped else output.finish_reason.value if output.finish_reason else None
                if text or reason:
                    yield TextDelta(index, text, reason, output.num_prompt_tokens, output.num_cached_tokens, num_output)
                if reason:
                    return


async def merge(streams: Sequence[TextStream]) -> TextStream:
    """Deltas of all streams in the order in which they come. The first error ends all of them."""
    if len(streams) == 1:
        async with aclosing(streams[0]) as only:
            async for delta in only:
                yield delta
        return
    queue: asyncio.Queue[TextDelta | Exception | None] = asyncio.Queue()
    tasks = [asyncio.create_task(_pump(stream, queue)) for stream in streams]
    num_open = len(tasks)
    try:
        while num_open:
            item = await queue.get()
            if isinstance(item, Exception):
                raise item
            if item is None:
                num_open -= 1
            else:
                yield item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _pump(stream: TextStream, queue: asyncio.Queue[TextDelta | Exception | None]) -> None:
    """Move a stream into a queue; its end is None, its failure the exception."""
    end: Exception | None = None
    try:
        async with aclosing(stream):
            async for delta in stream:
                queue.put_nowait(delta)
    except Exception as error:  # noqa: BLE001 - raised again by the reader of the queue
        end = error
    queue.put_nowait(end)
