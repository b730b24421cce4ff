"""Counts HTTP requests: by route and status, and how many are under way."""

from __future__ import annotations

from collections import Counter
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from dflash2.server.errors import CLIENT_LEFT

ROUTES = (
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/load_lora_adapter",
    "/v1/unload_lora_adapter",
    "/v1/models",
    "/v1/models/{model_id:path}",
    "/health",
    "/metrics",
    "/dflash2/",
    "/dflash2/{name:path}",
    "/dflash2/prefetch",
    "/dflash2/stats",
    "/dflash2/blocks",
    "/dflash2/policy",
    "/dflash2/policy/undo",
    "/dflash2/history",
    "/dflash2/history.csv",
)
"""Routes that are counted from zero on. Requests that match no route are counted as ``other``."""


class HttpTraffic:
    """Counters of one server. Belongs to the event loop."""

    def __init__(self) -> None:
        self.num_running = 0
        self.finished: Counter[tuple[str, int]] = Counter({(route, 200): 0 for route in ROUTES})
        """By (route, status)."""

    def as_dict(self) -> dict[str, Any]:
        """As JSON."""
        return {
            "http_requests_running": self.num_running,
            "http_requests": [
                {"route": route, "status": status, "count": count} for (route, status), count in self.finished.items()
            ],
        }


class CountTraffic:
    """ASGI middleware that feeds an ``HttpTraffic``."""

    def __init__(self, app: ASGIApp, traffic: HttpTraffic) -> None:
        self._app = app
        self._traffic = traffic

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        status = CLIENT_LEFT

        async def watching(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        self._traffic.num_running += 1
        try:
            await self._app(scope, receive, watching)
        finally:
            self._traffic.num_running -= 1
            # The route's template, never the path as sent: no client can invent a label.
            path = getattr(scope.get("route"), "path", "other")
            self._traffic.finished[path, status] += 1
