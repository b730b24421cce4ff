"""OpenAI's routes: completions, chats, models."""

from __future__ import annotations

import time
from typing import Any, TypeVar

from fastapi import APIRouter, Request
from fastapi.responses import Response

from dflash2.server.answering import streamed_answer, whole_answer
from dflash2.server.body import read_json
from dflash2.server.context import ServerContext
from dflash2.server.errors import ApiError
from dflash2.server.generation import Ask
from dflash2.server.replies import ChatReply, CompletionReply, Reply
from dflash2.server.schema import ChatBody, CompletionBody, GenerationBody, parse_body

Body = TypeVar("Body", bound=GenerationBody)


def openai_router(context: ServerContext) -> APIRouter:
    """The routes below ``/v1``."""
    router = APIRouter(prefix="/v1")

    @router.post("/chat/completions")
    async def chat(request: Request) -> Response:
        arrival_s = time.monotonic()
        body = await _read(context, request, ChatBody)
        reply = ChatReply(body.model)
        asks = context.frontend.chat_asks(body, reply.id, arrival_s)
        return await _answer(context, request, body, reply, asks)

    @router.post("/completions")
    async def completions(request: Request) -> Response:
        arrival_s = time.monotonic()
        body = await _read(context, request, CompletionBody)
        reply = CompletionReply(body.model)
        asks = context.frontend.completion_asks(body, reply.id, arrival_s)
        return await _answer(context, request, body, reply, asks)

    @router.get("/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [_model(context, name) for name in context.settings.model_names]}

    @router.get("/models/{model_id:path}")
    async def model(model_id: str) -> dict[str, Any]:
        _check_model(context, model_id)
        return _model(context, model_id)

    return router


async def _read(context: ServerContext, request: Request, kind: type[Body]) -> Body:
    settings = context.settings
    value = await read_json(request, settings.max_body_bytes, settings.body_timeout_s)
    body = parse_body(kind, value)
    _check_model(context, body.model)
    return body


async def _answer(
    context: ServerContext, request: Request, body: GenerationBody, reply: Reply, asks: list[Ask]
) -> Response:
    deltas = context.frontend.stream(asks, body.stop_strings)
    if body.stream:
        return await streamed_answer(request, deltas, reply, len(asks), with_usage=body.wants_stream_usage)
    return await whole_answer(request, deltas, reply, len(asks))


def _check_model(context: ServerContext, name: str) -> None:
    names = context.settings.model_names
    if name not in names:
        message = f"there is no model {name!r}; this server has {', '.join(names)}"
        raise ApiError(404, message, param="model", code="model_not_found")


def _model(context: ServerContext, name: str) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": context.created,
        "owned_by": "dflash2",
        "max_model_len": context.engine.max_context_tokens,
    }
