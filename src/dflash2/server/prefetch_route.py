"""``/dflash2/prefetch``: a client announces a prompt, and learns how much of it is cached where."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request
from pydantic import ValidationError

from dflash2.server.body import read_json
from dflash2.server.context import ServerContext
from dflash2.server.openai_routes import adapter_of, check_model
from dflash2.server.schema import PrefetchBody, first_fault


def prefetch_router(context: ServerContext) -> APIRouter:
    """The one route."""
    router = APIRouter()

    @router.post("/dflash2/prefetch")
    async def prefetch(request: Request) -> dict[str, Any]:
        settings = context.settings
        value = await read_json(request, settings.max_body_bytes, settings.body_timeout_s)
        try:
            body = PrefetchBody.model_validate(value)
        except ValidationError as error:
            raise first_fault(error) from None
        check_model(context, body.model)
        report = await context.frontend.prefetch(body, adapter_of(context, body.model))
        return {
            "prompt_tokens": report.num_prompt_tokens,
            "cached_tokens": {
                "hbm": report.hbm_tokens,
                "dram": report.dram_tokens,
                "nvme": report.nvme_tokens,
            },
            "missing_tokens": report.missing_tokens,
        }

    return router
