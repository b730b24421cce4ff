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
from dflash2.server.replies import ChatReply, Choices, CompletionReply, Reply
from dflash2.server.schema import MAX_CHOICES, ChatBody, CompletionBody, GenerationBody, parse_body

Body = TypeVar("Body", bound=GenerationBody)


def openai_router(context: ServerContext) -> APIRouter:
    """The routes below ``/v1``."""
    router = APIRouter(prefix="/v1")

    @router.post("/chat/completions")
    async def chat(request: Request) -> Response:
        arrival_s = time.monotonic()
        body = await _read(context, request, ChatBody)
        reply = ChatReply(body.model, with_logprobs=body.num_top_logprobs is not None)
        asks = context.frontend.chat_asks(body, reply.id, arrival_s, adapter_of(context, body.model))
        return await _answer(context, request, body, reply, asks)

    @router.post("/completions")
    async def completions(request: Request) -> Response:
        arrival_s = time.monotonic()
        body = await _read(context, request, CompletionBody)
        reply = CompletionReply(body.model, with_logprobs=body.num_top_logprobs is not None)
        asks = context.frontend.completion_asks(body, reply.id, arrival_s, adapter_of(context, body.model))
        return await _answer(context, request, body, reply, asks)

    @router.get("/models")
    async def models() -> dict[str, Any]:
        names = list(context.settings.model_names)
        if context.adapters is not None:
            names += [spec.name for spec in context.adapters.registry.all()]
        return {"object": "list", "data": [_model(context, name) for name in names]}

    @router.get("/models/{model_id:path}")
    async def model(model_id: str) -> dict[str, Any]:
        check_model(context, model_id)
        return _model(context, model_id)

    return router


async def _read(context: ServerContext, request: Request, kind: type[Body]) -> Body:
    settings = context.settings
    value = await read_json(request, settings.max_body_bytes, settings.body_timeout_s)
    body = parse_body(kind, value)
    check_model(context, body.model)
    return body


async def _answer(
    context: ServerContext, request: Request, body: GenerationBody, reply: Reply, asks: list[Ask]
) -> Response:
    num_choices = len(asks) * body.num_answers
    if num_choices > MAX_CHOICES:
        raise ApiError(400, f"at most {MAX_CHOICES} choices in one request, not {num_choices}", param="n")
    deltas = context.frontend.stream(asks, body.num_answers, body.stop_strings)
    choices = Choices(num_choices, body.num_answers)
    if body.stream:
        return await streamed_answer(request, deltas, reply, choices, with_usage=body.wants_stream_usage)
    return await whole_answer(request, deltas, reply, choices)


def check_model(context: ServerContext, name: str) -> None:
    """Raises ApiError: there is no model or adapter of that name."""
    names = list(context.settings.model_names)
    if context.adapters is not None:
        names += [spec.name for spec in context.adapters.registry.all()]
    if name not in names:
        message = f"there is no model {name!r}; this server has {', '.join(names)}"
        raise ApiError(404, message, param="model", code="model_not_found")


def adapter_of(context: ServerContext, name: str) -> str | None:
    """The adapter that a request names as its model; None for the model itself."""
    return None if name in context.settings.model_names else name


def _model(context: ServerContext, name: str) -> dict[str, Any]:
    base = context.settings.model_names
    return {
        "id": name,
        "object": "model",
        "created": context.created,
        "owned_by": "dflash2",
        "max_model_len": context.engine.max_context_tokens,
        "parent": None if name in base else base[0],
    }
