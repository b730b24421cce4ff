"""Adapters that come and go while the server runs, under the names that vLLM gave these routes."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Annotated, Any, TypeVar

from fastapi import APIRouter, Request
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from dflash2.engine.adapters import Adapters
from dflash2.errors import ModelError, RequestError
from dflash2.server.body import read_json
from dflash2.server.context import ServerContext
from dflash2.server.errors import ApiError
from dflash2.server.schema import first_fault

Name = Annotated[str, Field(min_length=1, max_length=128)]


class LoadBody(BaseModel):
    """``POST /v1/load_lora_adapter``."""

    model_config = ConfigDict(extra="forbid", strict=True)

    lora_name: Name
    lora_path: Annotated[str, Field(min_length=1, max_length=4096)]
    """Below the folder for adapters; absolute, or relative to it."""


class UnloadBody(BaseModel):
    """``POST /v1/unload_lora_adapter``."""

    model_config = ConfigDict(extra="forbid", strict=True)

    lora_name: Name


Body = TypeVar("Body", bound=BaseModel)


def lora_router(context: ServerContext) -> APIRouter:
    """Routes that register and unregister adapters."""
    router = APIRouter(prefix="/v1")

    @router.post("/load_lora_adapter")
    async def load(request: Request) -> dict[str, Any]:
        body = await _read(context, request, LoadBody)
        registry = _adapters(context).registry
        try:
            spec = await asyncio.to_thread(registry.add_from_client, body.lora_name, body.lora_path)
        except ModelError as error:
            raise ApiError(400, str(error), param="lora_path", code="bad_adapter") from error
        except RequestError as error:
            raise ApiError(400, str(error), param=error.param, code="bad_adapter") from error
        return {"id": spec.name, "object": "lora_adapter", "rank": spec.rank, "bytes": spec.num_bytes}

    @router.post("/unload_lora_adapter")
    async def unload(request: Request) -> dict[str, Any]:
        body = await _read(context, request, UnloadBody)
        adapters = _adapters(context)
        try:
            spec = adapters.registry.remove(body.lora_name)
        except RequestError as error:
            raise ApiError(404, str(error), param=error.param, code="model_not_found") from error
        await context.engine.between_steps(partial(adapters.forget, spec))
        return {"id": spec.name, "object": "lora_adapter", "deleted": True}

    return router


def _adapters(context: ServerContext) -> Adapters:
    if context.adapters is None:
        raise ApiError(400, "this server has no room for adapters: start it with --lora or --lora-dir", code="no_lora")
    return context.adapters


async def _read(context: ServerContext, request: Request, kind: type[Body]) -> Body:
    settings = context.settings
    value = await read_json(request, settings.max_body_bytes, settings.body_timeout_s)
    try:
        return kind.model_validate(value)
    except ValidationError as error:
        raise first_fault(error) from None
