"""Turns a stream of text into an HTTP answer, and a client that leaves into a cancelled request."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Coroutine
from contextlib import aclosing
from typing import Any, TypeVar

from fastapi import Request
from fastapi.responses import JSONResponse, Response, StreamingResponse
from starlette.requests import ClientDisconnect
from starlette.types import Send

from dflash2.server.answer_text import TextDelta
from dflash2.server.errors import to_api_error
from dflash2.server.generation import TextStream
from dflash2.server.replies import Choices, Reply

T = TypeVar("T")


async def whole_answer(request: Request, deltas: TextStream, reply: Reply, choices: Choices) -> Response:
    """Everything in one JSON object.

    Raises:
        DFlash2Error, ApiError: the request was refused or failed.
        ClientDisconnect: the client left; the engine's request is cancelled.
    """
    await until_disconnect(request, _collect(deltas, choices))
    return JSONResponse(reply.whole(choices), headers={"X-Request-Id": reply.id})


async def streamed_answer(
    request: Request, deltas: TextStream, reply: Reply, choices: Choices, *, with_usage: bool
) -> Response:
    """Server-sent events. The answer begins with the first text, so that a refusal still has its proper status.

    Raises:
        DFlash2Error, ApiError: the request was refused or failed before the first text.
        ClientDisconnect: the client left before the first text.
    """
    first = await until_disconnect(request, _first(deltas))
    events = _events(first, deltas, reply, choices, with_usage=with_usage)
    headers = {"X-Request-Id": reply.id, "Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
    return EventStream(events, headers=headers, media_type="text/event-stream")


class EventStream(StreamingResponse):
    """A streaming response that closes its source however it ends: served, failed, or left by the client."""

    body_iterator: AsyncGenerator[str, None]

    async def stream_response(self, send: Send) -> None:
        async with aclosing(self.body_iterator):
            await super().stream_response(send)


async def until_disconnect(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """Result of ``work``, which is cancelled if the client leaves.

    Args:
        request: its body has been read.
        work: what to wait for.

    Raises:
        ClientDisconnect: the client left first.
    """
    working = asyncio.create_task(work)
    watching = asyncio.create_task(_disconnect(request))
    try:
        await asyncio.wait({working, watching}, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise ClientDisconnect
    finally:
        working.cancel()
        watching.cancel()
        await asyncio.gather(working, watching, return_exceptions=True)


async def _disconnect(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _first(deltas: TextStream) -> TextDelta:
    return await anext(deltas)


async def _collect(deltas: TextStream, choices: Choices) -> None:
    async with aclosing(deltas):
        async for delta in deltas:
            choices.add(delta)


async def _events(
    first: TextDelta, rest: TextStream, reply: Reply, choices: Choices, *, with_usage: bool
) -> AsyncGenerator[str, None]:
    """The events of one answer. A failure becomes the last event, in place of ``[DONE]``."""
    # With usage asked for, every chunk but the last says that it has none, as OpenAI's API does.
    no_usage: dict[str, Any] = {"usage": None} if with_usage else {}
    try:
        async with aclosing(rest):
            for chunk in (*reply.opening(len(choices.all)), *reply.chunk(first)):
                yield _event({**chunk, **no_usage})
            choices.add(first)
            async for delta in rest:
                choices.add(delta)
                for chunk in reply.chunk(delta):
                    yield _event({**chunk, **no_usage})
    except Exception as error:  # noqa: BLE001 - the client is told; what is unknown is logged there
        yield _event(to_api_error(error).body())
        return
    if with_usage:
        yield _event(reply.usage_chunk(choices.usage()))
    yield "data: [DONE]\n\n"


def _event(value: dict[str, Any]) -> str:
    return f"data: {json.dumps(value, ensure_ascii=False, separators=(',', ':'))}\n\n"
