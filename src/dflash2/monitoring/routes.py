"""Web routes: the page with its files, and the data behind it. Used by `dflash2 serve` and beside other servers."""

from __future__ import annotations

from collections.abc import Callable
from importlib.resources import files
from typing import Any, TypeVar

from fastapi import APIRouter, HTTPException, Request
from fastapi.responses import RedirectResponse, Response, StreamingResponse
from pydantic_core import from_json

from dflash2.errors import ConfigError, DeadlineExceeded
from dflash2.monitoring.history import SPANS, History
from dflash2.monitoring.observer import Observed
from dflash2.monitoring.prometheus import CONTENT_TYPE, render
from dflash2.monitoring.view import View

T = TypeVar("T")

MAX_BLOCKS = 100
MAX_BODY_BYTES = 10_000
_TYPES = {"html": "text/html", "css": "text/css", "js": "text/javascript"}
_HEADERS = {
    "Content-Security-Policy": "default-src 'self'; img-src 'self' data:; frame-ancestors 'none'; base-uri 'none'; "
    "form-action 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


def page_router() -> APIRouter:
    """``/dflash2/``: the page. It holds no data and needs no key; its script asks for one where the data does."""
    router = APIRouter()
    folder = files("dflash2.monitoring") / "page"
    content = {file.name: file.read_bytes() for file in folder.iterdir() if file.name.rpartition(".")[2] in _TYPES}

    @router.get("/dflash2")
    async def to_page() -> Response:
        return RedirectResponse("/dflash2/")

    @router.get("/dflash2/")
    async def page() -> Response:
        return _file(content, "index.html")

    @router.get("/dflash2/{name:path}")
    async def part(name: str) -> Response:
        return _file(content, name)

    return router


def _file(content: dict[str, bytes], name: str) -> Response:
    if name not in content:
        raise HTTPException(404)
    kind = _TYPES[name.rpartition(".")[2]]
    return Response(content[name], media_type=f"{kind}; charset=utf-8", headers=_HEADERS)


def data_router(view: View) -> APIRouter:
    """``/metrics`` for Prometheus and what the page asks for. Guard it with a key unless only this machine can ask."""
    router = APIRouter()

    @router.get("/metrics")
    async def metrics() -> Response:
        return Response(render(await _collect(view)), media_type=CONTENT_TYPE)

    @router.get("/dflash2/stats")
    async def stats() -> dict[str, Any]:
        return await _collect(view)

    @router.get("/dflash2/blocks")
    async def blocks(count: str = "10") -> dict[str, Any]:
        if not count.isdigit() or not 0 < int(count) <= MAX_BLOCKS:
            raise HTTPException(400, f"count must be 1 to {MAX_BLOCKS}")
        return await _ask(view, lambda observed: observed.blocks(int(count)))

    @router.get("/dflash2/policy")
    async def policy() -> dict[str, Any]:
        return await _ask(view, view.dial.state)

    @router.post("/dflash2/policy")
    async def change(request: Request) -> dict[str, Any]:
        changes = await _json_object(request)
        return await _ask(view, lambda observed: view.dial.change(observed, changes))

    @router.post("/dflash2/policy/undo")
    async def undo(request: Request) -> dict[str, Any]:
        await _json_object(request)
        return await _ask(view, view.dial.undo)

    @router.get("/dflash2/history")
    async def history(span: str = "10m") -> dict[str, Any]:
        return _history(view, span).curves(span)

    @router.get("/dflash2/history.csv")
    async def history_csv(span: str = "10m") -> Response:
        lines = _history(view, span).csv(span)
        disposition = f'attachment; filename="dflash2-{span}.csv"'
        return StreamingResponse(lines, media_type="text/csv", headers={"Content-Disposition": disposition})

    return router


async def _collect(view: View) -> dict[str, Any]:
    try:
        return await view.collect()
    except DeadlineExceeded as error:
        raise HTTPException(503, str(error)) from error


async def _ask(view: View, question: Callable[[Observed], T]) -> T:
    try:
        return await view.ask(question)
    except DeadlineExceeded as error:
        raise HTTPException(503, str(error)) from error
    except ConfigError as error:
        raise HTTPException(400, str(error)) from error


async def _json_object(request: Request) -> dict[str, Any]:
    """The body. Only JSON by its content type: a page from elsewhere cannot send that without asking first."""
    if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
        raise HTTPException(415, "content-type must be application/json")
    body = b""
    async for chunk in request.stream():
        body += chunk
        if len(body) > MAX_BODY_BYTES:
            raise HTTPException(413, f"the body is larger than {MAX_BODY_BYTES} bytes")
    try:
        value = from_json(body)
    except ValueError as error:
        raise HTTPException(400, f"the body is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise HTTPException(400, "the body must be a JSON object")
    return value


def _history(view: View, span: str) -> History:
    if view.history is None:
        raise HTTPException(404, "no history is kept; set history_enabled to true in the configuration")
    if span not in SPANS:
        raise HTTPException(400, f"span must be one of {', '.join(SPANS)}")
    return view.history
