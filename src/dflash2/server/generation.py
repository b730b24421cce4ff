"""From a checked request to a stream of text: tokenise, ask the engine, detokenise, watch for stop strings."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing
from dataclasses import replace
from functools import partial
from typing import Any

from dflash2.engine.async_engine import AsyncEngine
from dflash2.engine.base import GenerationRequest, PrefetchReport
from dflash2.pipeline.chat import ChatRenderer
from dflash2.pipeline.detokenizer import CONTEXT_TOKENS
from dflash2.pipeline.pipeline import Pipeline, TextPrompt
from dflash2.pipeline.token_bytes import TokenBytes
from dflash2.pipeline.tokenizer import Tokenizer
from dflash2.server.answer_text import AnswerText, TextDelta
from dflash2.server.asking import hints_of, sampling_of
from dflash2.server.errors import ApiError, from_output
from dflash2.server.schema import ChatBody, CompletionBody, GenerationBody, PrefetchBody, parse_prompts

DEFAULT_COMPLETION_TOKENS = 16
"""As in OpenAI's API. Chats may use what the context leaves."""


TextStream = AsyncGenerator[TextDelta, None]
Ask = Callable[[], Awaitable[GenerationRequest]]
"""Makes one engine request ready. Called when its stream begins, so that no request holds a place in the ring while
another one of the same client waits for one."""


class Frontend:
    """What stands between HTTP and the engine.

    Args:
        engine: started.
        tokenizer: the model's, for the way back.
        chat: renders messages with the model's template.
        pipeline: makes requests ready for the engine.
    """

    def __init__(self, engine: AsyncEngine, tokenizer: Tokenizer, chat: ChatRenderer, pipeline: Pipeline) -> None:
        self.pipeline = pipeline
        self._engine = engine
        self._tokenizer = tokenizer
        self._token_bytes = TokenBytes(tokenizer.hf.backend_tokenizer)
        self._chat = chat

    def chat_asks(self, body: ChatBody, request_id: str, arrival_s: float, adapter: str | None = None) -> list[Ask]:
        """The one engine request of a chat. It raises RequestError or ApiError if the messages cannot be served."""
        prompt = self._chat_prompt(body.messages)
        return [partial(self._request, prompt, body, body.output_limit, request_id, arrival_s, "messages", adapter)]

    def completion_asks(
        self, body: CompletionBody, request_id: str, arrival_s: float, adapter: str | None = None
    ) -> list[Ask]:
        """One engine request for each prompt. It raises ApiError if its prompt is empty or too long.

        Raises:
            ApiError: a prompt has a token id that does not exist.
        """
        limit = body.output_limit or DEFAULT_COMPLETION_TOKENS
        return [
            partial(
                self._request, self._prompt(prompt), body, limit, f"{request_id}-{index}", arrival_s, "prompt", adapter
            )
            for index, prompt in enumerate(body.prompts)
        ]

    async def prefetch(self, body: PrefetchBody, adapter: str | None) -> PrefetchReport:
        """Have the engine bring what is cached of a prompt nearer.

        Raises:
            RequestError, ApiError: the prompt cannot be tokenised, or there is none.
        """
        given = [body.prompt is not None, body.messages is not None]
        if given.count(True) != 1:
            raise ApiError(400, "either prompt or messages must be given", param="prompt")
        if body.messages is not None:
            prompt: TextPrompt | list[int] = self._chat_prompt(body.messages)
        else:
            prompts = parse_prompts(body.prompt)
            if len(prompts) != 1:
                raise ApiError(400, "one prompt at a time", param="prompt")
            prompt = self._prompt(prompts[0])
        span = await self.pipeline.prepare(prompt, lambda num_prompt: self._output_room(num_prompt, 1, "prompt"))
        token_ids = span.prompt.copy()
        span.release()
        return await self._engine.prefetch(token_ids, adapter, body.cache_salt, body.ttl_s)

    def stream(self, asks: Sequence[Ask], num_answers: int, stops: Sequence[str]) -> TextStream:
        """The text of all requests as it comes; closing it cancels what still runs.

        Args:
            asks: the requests.
            num_answers: of each.
            stops: strings that end an answer.

        Raises (while iterating):
            DFlash2Error, ApiError: a request was refused or failed; the others are cancelled.
        """
        return merge([self._answers(number * num_answers, ask, num_answers, stops) for number, ask in enumerate(asks)])

    def _chat_prompt(self, messages: list[dict[str, Any]]) -> TextPrompt:
        num_chars = sum(len(str(message.get("content", ""))) for message in messages)
        return TextPrompt(lambda: self._chat.render(messages), num_chars, add_special_tokens=False)

    def _prompt(self, prompt: str | list[int]) -> TextPrompt | list[int]:
        if isinstance(prompt, str):
            return TextPrompt(prompt, len(prompt), add_special_tokens=True)
        vocab_size = self._tokenizer.vocab_size
        wrong = next((token_id for token_id in prompt if not 0 <= token_id < vocab_size), None)
        if wrong is not None:
            raise ApiError(400, f"token id {wrong} is not in 0..{vocab_size - 1}", param="prompt")
        return prompt

    async def _request(
        self,
        prompt: TextPrompt | list[int],
        body: GenerationBody,
        limit: int | None,
        request_id: str,
        arrival_s: float,
        param: str,
        adapter: str | None,
    ) -> GenerationRequest:
        sampling = sampling_of(body, 1)
        span = await self.pipeline.prepare(prompt, lambda num_prompt: self._output_room(num_prompt, limit, param))
        sampling = replace(sampling, max_tokens=self._output_room(span.num_prompt_tokens, limit, param))
        return GenerationRequest(
            request_id,
            span.prompt,
            sampling,
            arrival_s,
            adapter=adapter,
            tenant_salt=body.cache_salt,
            hints=hints_of(body),
            span=span,
        )

    def _output_room(self, num_prompt: int, limit: int | None, param: str) -> int:
        """The most tokens that may follow the prompt.

        Raises:
            ApiError: the prompt is empty or too long.
        """
        if num_prompt == 0:
            raise ApiError(400, "the prompt has no tokens", param=param)
        context = self._engine.max_context_tokens
        max_tokens = max(1, self._engine.max_resident_tokens - num_prompt) if limit is None else limit
        if num_prompt + max_tokens > context:
            raise ApiError(
                400,
                f"this model's context is {context} tokens, but {num_prompt + max_tokens} were requested "
                f"({num_prompt} in the {param}, {max_tokens} for the output)",
                param=param,
                code="context_length_exceeded",
            )
        return max_tokens

    async def _answers(self, first_index: int, ask: Ask, num_answers: int, stops: Sequence[str]) -> TextStream:
        """Text of one request's answers. Stop strings in all of them close the engine's stream."""
        request = await ask()
        prompt_end = request.token_ids[-CONTEXT_TOKENS:].tolist()
        decode, token_bytes = self._tokenizer.decode, self._token_bytes
        answers = [AnswerText(first_index + n, decode, token_bytes, prompt_end, stops) for n in range(num_answers)]
        async with aclosing(self._engine.generate(request)) as outputs:
            async for output in outputs:
                answer = answers[output.index]
                if answer.ended:
                    continue  # by a stop string, which the engine does not know of
                failure = from_output(output)
                if failure is not None:
                    raise failure
                delta = answer.push(output)
                if delta is None:
                    continue
                if delta.finish_reason is not None and output.finish_reason is None:
                    self._engine.end_answer(request.request_id, output.index)
                yield delta
                if all(one.ended for one in answers):
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
