"""A real server in a thread, over an engine that follows a script."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import httpx
import openai
import pytest
import uvicorn
from tests.engine.fake_engine import FakeEngine
from tests.pipeline.tiny_tokenizer import tiny_hf_tokenizer

from dflash2.engine.adapters import Adapters
from dflash2.engine.async_engine import AsyncEngine
from dflash2.monitoring.observer import Observer
from dflash2.pipeline.chat import ChatRenderer
from dflash2.pipeline.handoff import TokenRing
from dflash2.pipeline.pipeline import Pipeline
from dflash2.pipeline.tokenizer import Tokenizer
from dflash2.server.app import create_app
from dflash2.server.context import ServerContext, ServerSettings
from dflash2.server.generation import Frontend

MODEL = "org/tiny"
PATIENCE_S = 240.0
"""No test is to fail because the machine was busy with something else for a while."""


def until(condition: Callable[[], bool]) -> None:
    """Wait for what the server does."""
    for _ in range(2_000):
        if condition():
            return
        time.sleep(0.005)
    pytest.fail("it never came true")


@dataclass
class RunningServer:
    url: str
    context: ServerContext
    server: uvicorn.Server
    http: httpx.Client

    def client(self, **options: Any) -> openai.OpenAI:
        """The official client, without its retries."""
        return openai.OpenAI(
            base_url=f"{self.url}/v1", **{"api_key": "none", "max_retries": 0, "timeout": PATIENCE_S, **options}
        )

    def async_client(self) -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=PATIENCE_S)

    def post(self, path: str, body: Any = None, **options: Any) -> httpx.Response:
        if body is not None:
            options["json"] = body
        return self.http.post(self.url + path, **options)

    def get(self, path: str, **options: Any) -> httpx.Response:
        return self.http.get(self.url + path, **options)

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])


@contextmanager
def serving(
    fake: FakeEngine,
    chat_template: str | None = None,
    ring_tokens: int = 1 << 25,
    adapters: Adapters | None = None,
    observer: Observer | None = None,
    **settings: Any,
) -> Iterator[RunningServer]:
    """Serve until the block ends; then everything must have been closed."""
    hf = tiny_hf_tokenizer()
    tokenizer = Tokenizer(hf)
    engine = AsyncEngine(fake, idle_interval_s=0.01)
    ring = TokenRing(ring_tokens)
    pipeline = Pipeline(
        tokenizer,
        ring,
        ring_timeout_s=240,
        max_prompt_tokens=engine.max_context_tokens - 1,
        engine_busy_s=engine.busy_s,
    )
    frontend = Frontend(engine, tokenizer, ChatRenderer(hf, chat_template), pipeline)
    defaults = {"model_names": (MODEL, "alias"), "shutdown_grace_s": 5.0}
    context = ServerContext(
        ServerSettings(**{**defaults, **settings}), engine, frontend, adapters=adapters, observer=observer
    )
    if adapters is not None:
        adapters.registry.reserve(context.settings.model_names)
    listener = socket.create_server(("127.0.0.1", 0))
    config = uvicorn.Config(
        create_app(context), log_level="error", timeout_graceful_shutdown=int(PATIENCE_S), lifespan="on"
    )
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    try:
        until(lambda: server.started)
        with httpx.Client(timeout=PATIENCE_S) as http:
            yield RunningServer(f"http://127.0.0.1:{listener.getsockname()[1]}", context, server, http)
    finally:
        server.should_exit = True
        thread.join(PATIENCE_S)
        listener.close()
        tokenizer.close()
    assert not thread.is_alive()
    assert ring.num_held == 0
    assert getattr(fake, "num_closed", 1) == 1
