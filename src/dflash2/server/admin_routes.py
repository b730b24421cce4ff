"""For whoever runs the server: its health, and what the monitoring page and Prometheus see of it."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from fastapi.responses import JSONResponse

from dflash2.engine.async_engine import EngineState
from dflash2.monitoring.view import View
from dflash2.server.context import ServerContext


def health_router(context: ServerContext) -> APIRouter:
    """``/health``, which needs no key: 200 while requests are served, 503 otherwise."""
    router = APIRouter()

    @router.get("/health")
    async def health() -> JSONResponse:
        state, failure, stalled_s = context.engine.state, context.engine.failure, context.engine.stalled_for_s
        if stalled_s is not None:
            reason = f"the step that is under way has taken {stalled_s:.0f} s"
            return JSONResponse({"status": "stalled", "reason": reason}, 503)
        body = {"status": "ok" if state is EngineState.RUNNING else state.value}
        if failure is not None:
            body["reason"] = repr(failure)
        return JSONResponse(body, 200 if state is EngineState.RUNNING else 503)

    return router


def server_view(context: ServerContext) -> View:
    """The runtime's statistics with the server's own beside them."""

    async def collect() -> dict[str, Any]:
        stats = await context.engine.stats()
        up = context.engine.state is EngineState.RUNNING
        server = {"engine_up": up, **context.traffic.as_dict()}
        return {**stats, "pipeline": context.frontend.pipeline.stats(), "server": server}

    return View(context.observer, collect)
