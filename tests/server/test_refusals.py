"""Bad input gets the right status and an OpenAI error body, and leaves the server as it was."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
from tests.engine.fake_engine import FakeEngine
from tests.server.harness import MODEL, PATIENCE_S, RunningServer, serving, until

from dflash2.errors import RequestTooLarge

USER = [{"role": "user", "content": "hi"}]
MAX_BODY = 20_000


@pytest.fixture(scope="module")
def engine() -> FakeEngine:
    return FakeEngine(refuse=lambda r: RequestTooLarge("larger than the pool") if r.tenant_salt == "huge" else None)


@pytest.fixture(scope="module")
def server(engine: FakeEngine) -> Iterator[RunningServer]:
    with serving(engine, max_body_bytes=MAX_BODY) as server:
        yield server
        # After all the refusals of this file.
        answer = server.post("/v1/completions", {"model": MODEL, "prompt": "still here", "max_tokens": 10})
        assert answer.json()["choices"][0]["text"] == "still here"
        assert server.context.engine.num_running == 0
        until(lambda: server.context.traffic.num_running == 0)


def check(answer: httpx.Response, status: int, code: str | None, param: str | None) -> str:
    """The shape of an error; its message."""
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == ("server_error" if status >= 500 else "invalid_request_error")
    assert (error["code"], error["param"]) == (code, param)
    return error["message"]


CHAT: dict[str, Any] = {"model": MODEL, "messages": USER}
TEXT: dict[str, Any] = {"model": MODEL, "prompt": "hi"}


@pytest.mark.parametrize(
    ("change", "code", "param"),
    [
        ({"temperature": -0.1}, "invalid_value", "temperature"),
        ({"temperature": 2.1}, "invalid_value", "temperature"),
        ({"temperature": "hot"}, "invalid_value", "temperature"),
        ({"top_p": 0}, "invalid_value", "top_p"),
        ({"top_p": 1.1}, "invalid_value", "top_p"),
        ({"top_k": -2}, "invalid_value", "top_k"),
        ({"top_k": 1.5}, "invalid_value", "top_k"),
        ({"max_tokens": 0}, "invalid_value", "max_tokens"),
        ({"max_tokens": True}, "invalid_value", "max_tokens"),
        ({"max_tokens": "5"}, "invalid_value", "max_tokens"),
        ({"seed": 2**63}, "invalid_value", "seed"),
        ({"stop": ""}, "invalid_value", "stop"),
        ({"stop": ["a", ""]}, "invalid_value", "stop"),
        ({"stop": ["a"] * 17}, "invalid_value", "stop"),
        ({"stop_token_ids": [-1]}, "invalid_value", "stop_token_ids"),
        ({"cache_salt": ""}, "invalid_value", "cache_salt"),
        ({"stream": "yes"}, "invalid_value", "stream"),
        ({"stream_options": {"include_usage": True}}, None, "stream_options"),
        (
            {"stream": True, "stream_options": {"includeusage": True}},
            "unknown_parameter",
            "stream_options.includeusage",
        ),
        ({"temprature": 1}, "unknown_parameter", "temprature"),
        ({"n": 0}, "invalid_value", "n"),
        ({"n": 17}, "invalid_value", "n"),
        ({"best_of": 2}, None, "best_of"),
        ({"length_penalty": 1.0}, None, "length_penalty"),
        ({"use_beam_search": True, "n": 5}, None, "n"),
        ({"use_beam_search": True, "best_of": 5}, None, "best_of"),
        ({"use_beam_search": True, "n": 2, "best_of": 1}, None, "best_of"),
        ({"use_beam_search": True, "stop": "x"}, None, "stop"),
        ({"use_beam_search": True, "temperature": 0.5}, None, "temperature"),
        ({"logprobs": 0.5}, "invalid_value", "logprobs"),
        ({"pin": True}, None, "pin"),
        ({"ttl_s": 0}, "invalid_value", "ttl_s"),
        ({"ttl_s": 5}, None, "ttl_s"),
        ({"priority": 1.5}, "invalid_value", "priority"),
        ({"session_id": ""}, "invalid_value", "session_id"),
        ({"tools": [{"type": "function"}]}, "unsupported_parameter", "tools"),
        ({"tool_choice": "required"}, "unsupported_parameter", "tool_choice"),
        ({"functions": [{}]}, "unsupported_parameter", "functions"),
        ({"logit_bias": {"5": 1}}, "unsupported_parameter", "logit_bias"),
        ({"presence_penalty": 0.5}, "unsupported_parameter", "presence_penalty"),
        ({"frequency_penalty": 0.5}, "unsupported_parameter", "frequency_penalty"),
        ({"response_format": {"type": "json_object"}}, "unsupported_parameter", "response_format"),
        ({"reasoning_effort": "high"}, "unsupported_parameter", "reasoning_effort"),
        ({"model": None}, "invalid_value", "model"),
    ],
)
@pytest.mark.parametrize(("route", "base"), [("/v1/chat/completions", CHAT), ("/v1/completions", TEXT)])
def test_bad_fields(server: RunningServer, route: str, base: dict, change: dict, code: str | None, param: str) -> None:
    check(server.post(route, {**base, **change}), 400, code, param)


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity"])
@pytest.mark.parametrize("field", ["temperature", "top_p"])
def test_numbers_that_are_none(server: RunningServer, field: str, number: str) -> None:
    body = json.dumps(TEXT)[:-1] + f', "{field}": {number}}}'
    answer = server.post("/v1/completions", content=body, headers={"content-type": "application/json"})
    check(answer, 400, "invalid_value", field)


@pytest.mark.parametrize(
    "prompt",
    [
        None,
        "",
        [],
        [""],
        ["a", ""],
        [[]],
        [[1], []],
        5,
        {"a": 1},
        ["a", 1],
        [1, "a"],
        [1.0],
        [True],
        [[1], "a"],
        [[[1]]],
    ],
)
def test_bad_prompts(server: RunningServer, prompt: object) -> None:
    message = check(server.post("/v1/completions", {"model": MODEL, "prompt": prompt}), 400, None, "prompt")
    assert "empty" in message


@pytest.mark.parametrize("prompt", [[258], [-1], [[1], [2**40]]])
def test_token_ids_that_do_not_exist(server: RunningServer, prompt: object) -> None:
    check(server.post("/v1/completions", {"model": MODEL, "prompt": prompt}), 400, None, "prompt")


def test_too_many_prompts(server: RunningServer) -> None:
    check(server.post("/v1/completions", {"model": MODEL, "prompt": ["a"] * 129}), 400, None, "prompt")


@pytest.mark.parametrize(
    ("messages", "code", "param"),
    [
        ([], None, "messages"),
        ("hi", "invalid_value", "messages"),
        (["hi"], "invalid_value", "messages"),
        ([{"role": "robot", "content": "x"}], None, "messages[0].role"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}], None, "messages[0].content[0]"),
        ([{"role": "user", "content": "refuse me"}], None, "messages"),
    ],
)
def test_bad_messages(server: RunningServer, messages: object, code: str | None, param: str) -> None:
    check(server.post("/v1/chat/completions", {"model": MODEL, "messages": messages}), 400, code, param)


@pytest.mark.parametrize(
    ("route", "body", "param"),
    [
        ("/v1/chat/completions", {"messages": USER}, "model"),
        ("/v1/chat/completions", {"model": MODEL}, "messages"),
        ("/v1/completions", {"model": MODEL}, "prompt"),
    ],
)
def test_missing_fields(server: RunningServer, route: str, body: dict, param: str) -> None:
    check(server.post(route, body), 400, "missing_required_parameter", param)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("prompt", "max_tokens"), [("x" * 1_000, 1), ("x" * 990, 11), ("x", 1_000), ("x", 10**30), (["ok", "x" * 1_000], 1)]
)
def test_longer_than_the_context(server: RunningServer, prompt: object, max_tokens: int, stream: bool) -> None:
    body = {"model": MODEL, "prompt": prompt, "max_tokens": max_tokens, "stream": stream}
    message = check(server.post("/v1/completions", body), 400, "context_length_exceeded", "prompt")
    assert "1000 tokens" in message


def test_a_chat_longer_than_the_context(server: RunningServer) -> None:
    body = {"model": MODEL, "messages": [{"role": "user", "content": "x" * 1_000}]}
    check(server.post("/v1/chat/completions", body), 400, "context_length_exceeded", "messages")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("prompt", ["a", ["a", "b"]])
def test_larger_than_the_engine(server: RunningServer, stream: bool, prompt: object) -> None:
    body = {**TEXT, "prompt": prompt, "cache_salt": "huge", "stream": stream}
    message = check(server.post("/v1/completions", body), 400, "context_length_exceeded", None)
    assert message == "larger than the pool"


@pytest.mark.parametrize(
    "content", [b"", b"{", b"[1]", b"null", b'"x"', b"\xff\xfe", b'{"a": "\\ud800"}', b"[" * 10_000]
)
def test_bad_json(server: RunningServer, content: bytes) -> None:
    answer = server.post("/v1/completions", content=content, headers={"content-type": "application/json"})
    check(answer, 400, "invalid_json", None)


def test_a_body_of_another_type(server: RunningServer) -> None:
    answer = server.post("/v1/completions", content=json.dumps(TEXT), headers={"content-type": "text/plain"})
    check(answer, 415, "unsupported_media_type", None)


def test_unknown_model(server: RunningServer) -> None:
    with server.client() as client, pytest.raises(openai.NotFoundError) as caught:
        client.completions.create(model="gpt-9", prompt="x")
    assert caught.value.code == "model_not_found"
    assert MODEL in str(caught.value)


def test_unknown_route(server: RunningServer) -> None:
    check(server.get("/v1/nothing"), 404, "unknown_url", None)
    check(server.post("/", {}), 404, "unknown_url", None)


def test_wrong_method(server: RunningServer) -> None:
    answer = server.get("/v1/completions")
    check(answer, 405, "method_not_allowed", None)
    assert answer.headers["allow"] == "POST"


@pytest.mark.parametrize("num_bytes", [MAX_BODY, 3 * MAX_BODY, 100 * MAX_BODY])
@pytest.mark.parametrize("announced", [True, False])
def test_a_body_too_large(server: RunningServer, num_bytes: int, announced: bool) -> None:
    body = json.dumps({**TEXT, "prompt": "x" * num_bytes}).encode()
    content = body if announced else (body[i : i + 1_000] for i in range(0, len(body), 1_000))
    answer = server.post("/v1/completions", content=content, headers={"content-type": "application/json"})
    assert str(MAX_BODY) in check(answer, 413, "body_too_large", None)


def test_a_body_just_within_the_limit_is_read(server: RunningServer) -> None:
    body = json.dumps(TEXT).encode()
    body += b" " * (MAX_BODY - len(body))
    answer = server.post("/v1/completions", content=body, headers={"content-type": "application/json"})
    assert answer.status_code == 200


def test_a_body_that_does_not_arrive() -> None:
    with (
        serving(FakeEngine(), body_timeout_s=0.3) as server,
        socket.create_connection(("127.0.0.1", server.port), timeout=PATIENCE_S) as connection,
    ):
        connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{")
        answer = b"".join(iter(lambda: connection.recv(10_000), b""))
    assert answer.startswith(b"HTTP/1.1 408")
    assert b"body_timeout" in answer


def test_an_api_key_is_asked_for(engine: FakeEngine) -> None:
    with serving(FakeEngine(), api_key="sésame") as guarded:
        for given in (None, "Bearer wrong", "sésame", "Basic sésame"):
            headers = {} if given is None else {"authorization": given.encode()}
            for answer in (
                guarded.post("/v1/completions", TEXT, headers=headers),
                guarded.get("/v1/models", headers=headers),
                guarded.get("/metrics", headers=headers),
                guarded.get("/dflash2/stats", headers=headers),
            ):
                check(answer, 401, "invalid_api_key", None)
        assert guarded.get("/health").status_code == 200
        with serving(FakeEngine(), api_key="open") as other, other.client(api_key="open") as client:
            assert client.completions.create(model=MODEL, prompt="hi", max_tokens=2).choices[0].text == "hi"
