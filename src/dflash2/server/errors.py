"""Errors as OpenAI clients expect them: ``{"error": {"message", "type", "param", "code"}}`` and the right status.

400  bad input; ``context_length_exceeded`` where the prompt is too long
401  API key missing or wrong
404  unknown model (``model_not_found``) or route
405  method not allowed
408  the body did not arrive in time
413  body too large
415  body is not JSON by its content type
429  too many requests wait already; with ``Retry-After``
503  not admitted in time, engine stopped; with ``Retry-After``
500  everything else
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from dflash2.engine.base import FinishReason, TokenOutput
from dflash2.errors import (
    CapacityError,
    DeadlineExceeded,
    DFlash2Error,
    EngineStopped,
    QueueFull,
    RequestError,
    RequestTooLarge,
)

logger = logging.getLogger(__name__)

RETRY_AFTER_S = 1
"""Where nothing better is known."""
CLIENT_LEFT = 499
"""Status under which a request is counted whose client left before the answer began (nginx's convention)."""


class ApiError(Exception):
    """An answer that is an error.

    Args:
        status: HTTP status.
        message: for people.
        param: the offending field.
        code: for programs; stable.
        headers: added to the answer.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.headers = dict(headers or {})

    def body(self) -> dict[str, Any]:
        """The JSON body."""
        kind = "server_error" if self.status >= 500 else "invalid_request_error"
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    def response(self) -> JSONResponse:
        """The HTTP answer."""
        return JSONResponse(self.body(), self.status, headers=self.headers)


def unavailable(message: str, code: str, retry_after_s: float = RETRY_AFTER_S, *, status: int = 503) -> ApiError:
    """The request was fine and may be sent again."""
    return ApiError(status, message, code=code, headers={"Retry-After": str(max(1, math.ceil(retry_after_s)))})


def to_api_error(error: Exception) -> ApiError:
    """The answer for any error that comes out of the layers below. What is not known becomes a logged 500."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, RequestTooLarge):
        return ApiError(400, str(error), code="context_length_exceeded")
    if isinstance(error, RequestError):
        return ApiError(400, str(error), param=error.param)
    if isinstance(error, EngineStopped):
        return unavailable(str(error), "engine_stopped")
    if isinstance(error, QueueFull):
        return unavailable(str(error), "queue_full", error.retry_after_s, status=429)
    if isinstance(error, DeadlineExceeded):
        return unavailable(str(error), "overloaded", error.retry_after_s)
    if isinstance(error, CapacityError):
        return unavailable(str(error), "overloaded")
    logger.error("a request failed", exc_info=error)
    return ApiError(500, f"internal error: {type(error).__name__}", code="internal_error")


def from_output(output: TokenOutput) -> ApiError | None:
    """The answer for a request that did not end well; None for all other outputs."""
    if output.finish_reason is FinishReason.CANCELLED:
        return unavailable("the request was cancelled by the server", "cancelled")
    return None if output.error is None else to_api_error(output.error)


def install_handlers(app: FastAPI) -> None:
    """Have every error of ``app`` leave in the shape above."""

    async def on_http(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        where = f"{request.method} {request.url.path}"
        if error.status_code == 404:
            api = ApiError(404, f"there is no {where}", code="unknown_url")
        elif error.status_code == 405:
            api = ApiError(405, f"{where} is not allowed", code="method_not_allowed", headers=error.headers)
        else:
            api = ApiError(error.status_code, error.detail, headers=error.headers)
        return api.response()

    async def on_error(request: Request, error: Exception) -> Response:
        return to_api_error(error).response()

    async def on_disconnect(request: Request, error: Exception) -> Response:
        return Response(status_code=CLIENT_LEFT)  # nobody reads it; the status is for the counters

    app.add_exception_handler(HTTPException, on_http)
    app.add_exception_handler(ClientDisconnect, on_disconnect)
    for kind in (ApiError, DFlash2Error, Exception):
        app.add_exception_handler(kind, on_error)
