"""The web application, put together from its routes."""

from __future__ import annotations

import hmac
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

from fastapi import Depends, FastAPI, Request

from dflash2.monitoring.routes import data_router, page_router
from dflash2.server.admin_routes import health_router, server_view
from dflash2.server.context import ServerContext
from dflash2.server.errors import ApiError, install_handlers
from dflash2.server.lora_routes import lora_router
from dflash2.server.openai_routes import openai_router
from dflash2.server.prefetch_route import prefetch_router
from dflash2.server.traffic import CountTraffic


def create_app(context: ServerContext) -> FastAPI:
    """The application; it starts the engine's thread when it starts and closes the engine when it stops.

    Args:
        context: its parts; the engine is not started yet.
    """

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        await context.engine.start()
        try:
            yield
        finally:
            await context.engine.close(context.settings.shutdown_grace_s)

    # The pages that would show the schema load their scripts from elsewhere, and the bodies are checked by hand.
    app = FastAPI(title="DFlash2", lifespan=lifespan, openapi_url=None)
    install_handlers(app)
    app.add_middleware(CountTraffic, traffic=context.traffic)
    app.include_router(health_router(context))
    guard = [Depends(_key_check(context.settings.api_key))]
    for router in (
        openai_router(context),
        lora_router(context),
        prefetch_router(context),
        data_router(server_view(context)),
    ):
        app.include_router(router, dependencies=guard)
    app.include_router(page_router())
    return app


def _key_check(api_key: str | None) -> Callable[[Request], Awaitable[None]]:
    """A dependency that lets a request pass if it carries the key."""

    async def check(request: Request) -> None:
        if api_key is None:
            return
        scheme, _, given = request.headers.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer" or not hmac.compare_digest(given.strip().encode(), api_key.encode()):
            raise ApiError(
                401, "a valid API key is needed", code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"}
            )

    return check
