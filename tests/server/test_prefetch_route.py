"""``/dflash2/prefetch`` and the hints of requests, over a scripted engine."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from tests.engine.fake_engine import FakeEngine
from tests.server.harness import MODEL, RunningServer, serving

from dflash2.engine.base import RequestHints

USER = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def engine() -> FakeEngine:
    return FakeEngine()


@pytest.fixture(scope="module")
def server(engine: FakeEngine) -> Iterator[RunningServer]:
    with serving(engine) as server:
        yield server


@pytest.mark.parametrize(
    ("given", "tokens"),
    [
        ({"prompt": "abc"}, list(b"abc")),
        ({"prompt": [1, 2, 3]}, [1, 2, 3]),
        ({"messages": USER}, [256, *b"user: hi", 257, 256, *b"assistant: "]),
    ],
)
def test_a_prompt_is_announced_as_it_will_be_sent(
    server: RunningServer, engine: FakeEngine, given: dict[str, Any], tokens: list[int]
) -> None:
    body = {"model": MODEL, "cache_salt": "t", "ttl_s": 7.0, **given}
    answer = server.post("/dflash2/prefetch", body)
    assert answer.status_code == 200, answer.text
    assert answer.json() == {
        "prompt_tokens": len(tokens),
        "cached_tokens": {"hbm": 4, "dram": 2, "nvme": 1},
        "missing_tokens": len(tokens) - 7,
    }
    assert engine.expected[-1] == (tokens, None, "t", 7.0)


@pytest.mark.parametrize(
    ("body", "status", "param"),
    [
        ({"prompt": "a"}, 400, "model"),
        ({"model": "other", "prompt": "a"}, 404, "model"),
        ({"model": MODEL}, 400, "prompt"),
        ({"model": MODEL, "prompt": "a", "messages": USER}, 400, "prompt"),
        ({"model": MODEL, "prompt": ["a", "b"]}, 400, "prompt"),
        ({"model": MODEL, "prompt": ""}, 400, "prompt"),
        ({"model": MODEL, "prompt": [70_000]}, 400, "prompt"),
        ({"model": MODEL, "prompt": "a", "ttl_s": 0}, 400, "ttl_s"),
        ({"model": MODEL, "prompt": "a", "max_tokens": 1}, 400, "max_tokens"),
    ],
)
def test_what_is_no_announcement(server: RunningServer, body: dict[str, Any], status: int, param: str) -> None:
    answer = server.post("/dflash2/prefetch", body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (status, param)


def test_hints_of_a_request_reach_the_engine(server: RunningServer, engine: FakeEngine) -> None:
    with server.client() as client:
        more = {"session_id": "s1", "ttl_s": 30.0, "pin": True, "priority": -2}
        client.chat.completions.create(model=MODEL, messages=USER, max_tokens=1, extra_body=more)
        assert engine.added[-1].hints == RequestHints("s1", 30.0, -2, pin=True)
        client.completions.create(model=MODEL, prompt="a", max_tokens=1)
        assert engine.added[-1].hints == RequestHints()
