from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

import pytest

from dflash2.server.answering import EventStream


def test_a_stream_whose_client_is_gone_closes_its_source_at_once() -> None:
    """The connection may break while an event is being sent, when nothing waits in the source."""
    closed = []

    async def source() -> AsyncGenerator[str, None]:
        try:
            while True:
                yield "data: x\n\n"
        finally:
            closed.append(True)

    async def receive() -> dict:
        await asyncio.Event().wait()
        raise AssertionError

    async def send(message: dict) -> None:
        if message["type"] == "http.response.body":
            raise ConnectionError("gone")

    async def main() -> None:
        events = source()  # held on to, so that neither the garbage collector nor the loop's end closes it
        with pytest.raises(ConnectionError):
            await EventStream(events)({"type": "http"}, receive, send)
        assert closed == [True]

    asyncio.run(main())


def test_without_a_break_all_is_sent() -> None:
    sent: list[bytes] = []

    async def source() -> AsyncGenerator[str, None]:
        yield "é"
        yield "b"

    async def receive() -> dict:
        await asyncio.Event().wait()
        raise AssertionError

    async def send(message: dict) -> None:
        sent.append(message.get("body", b""))

    asyncio.run(EventStream(source())({"type": "http"}, receive, send))
    assert b"".join(sent) == "éb".encode()
