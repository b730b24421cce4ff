"""Runs the web application until it is told to stop, and then stops it in good order."""

from __future__ import annotations

import asyncio
import signal
import socket
from collections.abc import Iterator
from contextlib import contextmanager

import uvicorn

from dflash2.engine.adapters import Adapters
from dflash2.engine.async_engine import AsyncEngine, EngineState
from dflash2.engine.base import Engine
from dflash2.monitoring.observer import Observer
from dflash2.monitoring.recording import TrafficRecorder
from dflash2.pipeline.chat import ChatRenderer
from dflash2.pipeline.handoff import TokenRing
from dflash2.pipeline.pipeline import Pipeline
from dflash2.pipeline.tokenizer import Tokenizer
from dflash2.server.app import create_app
from dflash2.server.context import ServerContext, ServerSettings
from dflash2.server.generation import Frontend
from dflash2.server.recorded_engine import RecordedEngine

FLUSH_S = 5
"""After the grace period clients are told that the server stops; this long it waits for them to take the news."""


class GracefulServer(uvicorn.Server):
    """Closes the engine as soon as no new connection is accepted, so that what it ends still reaches its client."""

    def __init__(self, config: uvicorn.Config, context: ServerContext) -> None:
        super().__init__(config)
        self._context = context

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        names = ", ".join(self._context.settings.model_names)
        for listener in sockets or ():
            print(f"DFlash2: serving {names} on {_url(listener)}", flush=True)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        closing = asyncio.create_task(self._context.engine.close(self._context.settings.shutdown_grace_s))
        await super().shutdown(sockets)
        await closing


def serve(
    engine: Engine,
    tokenizer: Tokenizer,
    settings: ServerSettings,
    listener: socket.socket,
    chat_template: str | None = None,
    *,
    adapters: Adapters | None = None,
    observer: Observer | None = None,
    recorder: TrafficRecorder | None = None,
    page_locked: bool = False,
    access_log: bool = False,
) -> int:
    """Serve until SIGTERM or SIGINT; a second SIGINT does not wait for running requests.

    Args:
        engine: owned from here on.
        tokenizer: the model's; owned from here on.
        settings: of the server.
        listener: bound, not listening yet.
        chat_template: in place of the model's own.
        adapters: the engine's, if it has any.
        observer: of the engine's runtime, for the monitoring page.
        recorder: is told of all traffic; owned from here on.
        page_locked: the engine's device can copy from host memory directly if it is page-locked.
        access_log: log every request.

    Returns:
        0 after an orderly stop, 1 if the engine failed or could not be closed.

    Raises:
        RequestError: an adapter has the name of the model.
    """
    if adapters is not None:
        adapters.registry.reserve(settings.model_names)
    async_engine = AsyncEngine(engine) if recorder is None else RecordedEngine(engine, recorder)
    chat = ChatRenderer(tokenizer.hf, chat_template)
    pipeline = Pipeline(
        tokenizer,
        TokenRing(settings.pipeline.ring_tokens, page_locked=page_locked),
        ring_timeout_s=settings.admission_timeout_s,
        max_prompt_tokens=async_engine.max_context_tokens - 1,
        enabled=settings.pipeline.enabled,
        max_requests=settings.pipeline.max_requests,
        engine_busy_s=async_engine.busy_s,
    )
    context = ServerContext(
        settings,
        async_engine,
        Frontend(async_engine, tokenizer, chat, pipeline),
        adapters=adapters,
        observer=observer,
    )
    config = uvicorn.Config(
        create_app(context),
        access_log=access_log,
        lifespan="on",
        timeout_graceful_shutdown=int(settings.shutdown_grace_s) + FLUSH_S,
    )
    with _signals_are_spent():
        GracefulServer(config, context).run(sockets=[listener])
    tokenizer.close()
    if recorder is not None:
        recorder.close()
    return 0 if async_engine.state is EngineState.CLOSED else 1


def _url(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if listener.family is socket.AF_INET6 else f"http://{host}:{port}"


@contextmanager
def _signals_are_spent() -> Iterator[None]:
    """uvicorn sends itself the signal that stopped it once more at its end; here that has nothing left to do."""
    before = {number: signal.signal(number, lambda *_: None) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
