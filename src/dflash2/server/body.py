"""Reads a JSON body with a limit on its size and on the time it may take, whether its length was announced or not."""

from __future__ import annotations

import asyncio
from typing import Any

from fastapi import Request
from pydantic_core import from_json

from dflash2.server.errors import ApiError

DRAIN_FACTOR = 4
"""A client that sends too much reads the answer only once it has sent all: up to this many times the limit is
read and thrown away before the 413."""


async def read_json(request: Request, max_bytes: int, timeout_s: float) -> dict[str, Any]:
    """The JSON object in the body.

    Args:
        request: its body has not been read yet.
        max_bytes: largest body.
        timeout_s: for the whole body.

    Raises:
        ApiError: 415, 413, 408, or 400 for what is not a JSON object.
    """
    content_type = request.headers.get("content-type", "application/json").partition(";")[0].strip().lower()
    if content_type != "application/json":
        # Also what keeps a web page elsewhere from posting to a server on this machine without asking.
        raise ApiError(415, f"content-type must be application/json, not {content_type}", code="unsupported_media_type")
    try:
        body = await asyncio.wait_for(_read(request, max_bytes), timeout_s)
    except asyncio.TimeoutError:
        raise ApiError(
            408, f"the body did not arrive within {timeout_s:g} s", code="body_timeout", headers={"Connection": "close"}
        ) from None
    try:
        value = from_json(body)
    except ValueError as error:
        raise ApiError(400, f"the body is not valid JSON: {error}", code="invalid_json") from None
    if not isinstance(value, dict):
        raise ApiError(400, "the body must be a JSON object", code="invalid_json")
    return value


async def _read(request: Request, max_bytes: int) -> bytes:
    announced = request.headers.get("content-length", "")
    if announced.isdigit() and int(announced) > DRAIN_FACTOR * max_bytes:
        raise _too_large(max_bytes)
    chunks: list[bytes] = []
    num_bytes = 0
    async for chunk in request.stream():
        num_bytes += len(chunk)
        if num_bytes <= max_bytes:
            chunks.append(chunk)
        elif num_bytes > DRAIN_FACTOR * max_bytes:
            break
    if num_bytes > max_bytes:
        raise _too_large(max_bytes)
    return b"".join(chunks)


def _too_large(max_bytes: int) -> ApiError:
    return ApiError(
        413,
        f"the body is larger than {max_bytes} bytes (--max-body-mb)",
        code="body_too_large",
        headers={"Connection": "close"},
    )
