"""The page on a port of its own, for engines whose server is not ours."""

from __future__ import annotations

import asyncio
import hmac
import ipaddress
import logging
import socket
import threading
from collections.abc import Awaitable, Callable

import uvicorn
from fastapi import Depends, FastAPI, HTTPException, Request

from dflash2.errors import ConfigError, DFlash2Error
from dflash2.monitoring.observer import Observer
from dflash2.monitoring.routes import data_router, page_router
from dflash2.monitoring.view import View

logger = logging.getLogger(__name__)

STOP_TIMEOUT_S = 10.0
"""How long ``close`` waits for answers that are under way."""


def create_monitor_app(observer: Observer, token: str | None = None) -> FastAPI:
    """The page and its data as an ASGI application.

    Args:
        observer: of a runtime that another thread drives.
        token: asked for as ``Authorization: Bearer``; None: only requests to a loopback name are answered, so that a
            page from elsewhere whose name suddenly means this machine gets nothing.
    """
    app = FastAPI(title="DFlash2", openapi_url=None)
    app.include_router(data_router(View(observer)), dependencies=[Depends(_check(token))])
    app.include_router(page_router())
    return app


class MonitorServer:
    """Serves the application from a thread of its own until ``close``.

    Args:
        observer: of the runtime.
        host: address to listen on.
        port: 0 picks a free one.
        token: see ``create_monitor_app``.

    Raises:
        ConfigError: the address can be reached from elsewhere and there is no token.
        DFlash2Error: the address is taken.
    """

    def __init__(self, observer: Observer, host: str = "127.0.0.1", port: int = 0, token: str | None = None) -> None:
        try:
            self._listener = socket.create_server((host, port), family=_family(host))
        except OSError as error:
            raise DFlash2Error(f"cannot show the page on {host} port {port}: {error.strerror or error}") from error
        address = self._listener.getsockname()
        if token is None and not ipaddress.ip_address(address[0]).is_loopback:
            self._listener.close()
            raise ConfigError(f"the page on {host} can be reached from elsewhere, so it needs a token")
        self.url = f"http://{f'[{address[0]}]' if ':' in address[0] else address[0]}:{address[1]}/dflash2/"
        config = uvicorn.Config(create_monitor_app(observer, token), log_level="warning", lifespan="off")
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._run, name="dflash2-page", daemon=True)
        self._thread.start()
        logger.info("DFlash2: page at %s", self.url)

    def close(self) -> None:
        """Stop serving. Idempotent."""
        self._server.should_exit = True
        self._thread.join(STOP_TIMEOUT_S)
        self._listener.close()

    def _run(self) -> None:
        asyncio.run(self._server.serve(sockets=[self._listener]))


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def _check(token: str | None) -> Callable[[Request], Awaitable[None]]:
    async def check(request: Request) -> None:
        if token is None:
            if not _is_loopback_name(request.url.hostname or ""):
                raise HTTPException(403, "without a token only requests to a loopback address are answered")
            return
        scheme, _, given = request.headers.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer" or not hmac.compare_digest(given.strip().encode(), token.encode()):
            raise HTTPException(401, "a valid token is needed", headers={"WWW-Authenticate": "Bearer"})

    return check


def _is_loopback_name(name: str) -> bool:
    try:
        return ipaddress.ip_address(name.strip("[]")).is_loopback
    except ValueError:
        return name == "localhost" or name.endswith(".localhost")
