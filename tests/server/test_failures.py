"""What happens when something goes wrong after a request was accepted, and when the server stops."""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx
import openai
import pytest
from tests.engine.fake_engine import Failed, FakeEngine, says
from tests.server.harness import MODEL, PATIENCE_S, RunningServer, serving, until

from dflash2.engine import async_engine
from dflash2.engine.base import FinishReason
from dflash2.errors import DeadlineExceeded, QueueFull, RequestError

A, B = ord("a"), ord("b")
ENDLESS = {"model": MODEL, "prompt": "abc", "max_tokens": 10**6}


@pytest.fixture
def slow() -> FakeEngine:
    return FakeEngine(max_context_tokens=10**7, step_s=0.002)


@pytest.fixture
def slow_server(slow: FakeEngine) -> Iterator[RunningServer]:
    with serving(slow) as server:
        yield server


@pytest.mark.parametrize("prompt", ["abc", ["abc", "de", "f"]])
def test_leaving_a_stream_cancels_the_request(slow_server: RunningServer, slow: FakeEngine, prompt: object) -> None:
    with slow_server.client() as client:
        stream = client.completions.create(**{**ENDLESS, "prompt": prompt}, stream=True)
        next(stream)
        assert slow.running
        stream.close()
        until(lambda: not slow.running)
    assert sorted(slow.cancelled) == sorted(request.request_id for request in slow.added)
    until(lambda: slow_server.context.engine.num_running == 0 and slow_server.context.traffic.num_running == 0)


@pytest.mark.parametrize("stream", [False, True])
def test_leaving_before_the_answer_cancels_the_request(stream: bool) -> None:
    fake = FakeEngine(gate=threading.Event())
    with serving(fake) as server:
        with pytest.raises(httpx.ReadTimeout):
            server.post("/v1/completions", {**ENDLESS, "max_tokens": 900, "stream": stream}, timeout=0.3)
        until(lambda: server.context.traffic.finished["/v1/completions", 499] == 1)
        assert server.context.engine.num_running == 0
        fake.gate.set()
        until(lambda: len(fake.cancelled) == 1 and not fake.has_work)


def test_leaving_disturbs_nobody_else(slow_server: RunningServer, slow: FakeEngine) -> None:
    with slow_server.client() as client:
        staying = client.completions.create(model=MODEL, prompt="stay ", max_tokens=200, stream=True)
        leaving = client.completions.create(**ENDLESS, stream=True)
        next(leaving)
        leaving.close()
        assert "".join(chunk.choices[0].text for chunk in staying) == "stay " * 40


@pytest.mark.parametrize("stream", [False, True])
def test_not_admitted_in_time(stream: bool) -> None:
    error = DeadlineExceeded("no room within 30 s", retry_after_s=12.3)
    with serving(FakeEngine(says(Failed(error, FinishReason.TIMEOUT)))) as server, server.client() as client:
        with pytest.raises(openai.InternalServerError) as caught:
            client.completions.create(model=MODEL, prompt="x", stream=stream)
        assert caught.value.status_code == 503
        assert caught.value.code == "overloaded"
        assert caught.value.response.headers["retry-after"] == "13"
        assert str(error) in caught.value.message


def test_a_full_queue_is_429_with_the_time_to_come_back() -> None:
    fake = FakeEngine(refuse=lambda request: QueueFull("9 requests wait already", retry_after_s=4.0))
    with serving(fake) as server:
        answer = server.post("/v1/completions", {"model": MODEL, "prompt": "x"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (429, "queue_full")
    assert answer.headers["retry-after"] == "4"
    assert answer.json()["error"]["message"] == "9 requests wait already"


def test_health_notices_a_step_that_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeEngine(gate=threading.Event())
    monkeypatch.setattr(async_engine, "STATS_PATIENCE_S", 0.01)
    with serving(fake) as server, ThreadPoolExecutor() as pool:
        assert server.get("/health").json() == {"status": "ok"}
        waiting = pool.submit(server.post, "/v1/completions", {"model": MODEL, "prompt": "x", "max_tokens": 2})
        until(lambda: bool(fake.added))
        assert server.get("/health").status_code == 200
        monkeypatch.setattr(async_engine, "STALL_S", 0.0)
        until(lambda: server.get("/health").status_code == 503)
        assert server.get("/health").json()["status"] == "stalled"
        assert server.get("/metrics").status_code == 200  # with what was known last
        monkeypatch.setattr(async_engine, "STALL_S", 120.0)
        fake.gate.set()
        assert waiting.result().status_code == 200
        assert server.get("/health").json() == {"status": "ok"}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("item", "status", "code"),
    [
        (Failed(RequestError("no such adapter", param="model")), 400, None),
        (Failed(OSError("disk")), 500, "internal_error"),
        (FinishReason.CANCELLED, 503, "cancelled"),
    ],
)
def test_a_request_that_fails_at_once(item: object, status: int, code: str | None, stream: bool) -> None:
    with serving(FakeEngine(says(item))) as server:
        answer = server.post("/v1/completions", {"model": MODEL, "prompt": "x", "stream": stream})
        assert (answer.status_code, answer.json()["error"]["code"]) == (status, code)
        assert "disk" not in answer.text  # what went wrong inside is for the log


def test_a_failure_after_the_stream_began_is_an_event() -> None:
    with serving(FakeEngine(says(A, B, Failed(OSError("disk"))))) as server, server.client() as client:
        stream = client.completions.create(model=MODEL, prompt="x", stream=True)
        assert [next(stream).choices[0].text for _ in range(2)] == ["a", "b"]
        with pytest.raises(openai.APIError) as caught:
            next(stream)
        assert caught.value.code == "internal_error"
        raw = server.post("/v1/completions", {"model": MODEL, "prompt": "x", "stream": True}).text
        last = raw.strip().split("\n\n")[-1]
        assert json.loads(last.removeprefix("data: "))["error"]["type"] == "server_error"
        assert "[DONE]" not in raw


def test_one_failure_ends_all_prompts_of_its_request() -> None:
    def script(request):
        return iter([A, Failed(OSError("disk"))]) if request.token_ids[0] == B else iter([A] * 10**6)

    fake = FakeEngine(script, max_context_tokens=10**7)
    with serving(fake) as server:
        answer = server.post("/v1/completions", {**ENDLESS, "prompt": ["a", "b", "a"]})
        assert answer.status_code == 500
        until(lambda: len(fake.cancelled) == 2 and not fake.running)


def test_a_dead_engine(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.CRITICAL), serving(FakeEngine(says(A, A, RuntimeError("device lost")))) as server:
        assert server.get("/health").json() == {"status": "ok"}
        raw = server.post("/v1/completions", {"model": MODEL, "prompt": "x", "stream": True})
        assert raw.status_code == 200
        assert "device lost" in raw.text.strip().split("\n\n")[-1]
        health = server.get("/health")
        assert (health.status_code, health.json()["status"]) == (503, "dead")
        assert "device lost" in health.json()["reason"]
        for stream in (False, True):
            answer = server.post("/v1/completions", {"model": MODEL, "prompt": "x", "stream": stream})
            assert (answer.status_code, answer.json()["error"]["code"]) == (503, "engine_stopped")
            assert answer.headers["retry-after"]
        assert "dflash2_engine_up 0.0" in server.get("/metrics").text
        assert server.get("/v1/models").status_code == 200


def test_a_stopping_server_lets_requests_finish() -> None:
    fake = FakeEngine(step_s=0.002)
    with serving(fake, shutdown_grace_s=PATIENCE_S) as server, server.client() as client:
        stream = client.completions.create(model=MODEL, prompt="ab", max_tokens=200, stream=True)
        next(stream)
        server.server.should_exit = True
        assert "".join(chunk.choices[0].text for chunk in stream) == "b" + "ab" * 99
    assert fake.cancelled == []


def test_a_prompt_of_a_megabyte_is_served_if_it_fits() -> None:
    text = "x" * 1_000_000
    with serving(FakeEngine(max_context_tokens=2_000_000)) as server:
        answer = server.post("/v1/completions", {"model": MODEL, "prompt": text, "max_tokens": 3})
        assert answer.json()["usage"]["prompt_tokens"] == 1_000_000
    with serving(FakeEngine()) as server:
        answer = server.post("/v1/completions", {"model": MODEL, "prompt": text, "max_tokens": 3})
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "context_length_exceeded")


def test_a_client_that_reads_nothing_blocks_nobody(slow_server: RunningServer) -> None:
    body = {**ENDLESS, "max_tokens": 3_000, "stream": True}
    with slow_server.http.stream("POST", "/v1/completions".join([slow_server.url, ""]), json=body):
        answer = slow_server.post("/v1/completions", {"model": MODEL, "prompt": "ab", "max_tokens": 20})
        assert answer.json()["choices"][0]["text"] == "ab" * 10


def test_statistics(slow_server: RunningServer) -> None:
    slow_server.post("/v1/completions", {"model": MODEL, "prompt": "ab", "max_tokens": 3})
    slow_server.get("/no/such/route")
    stats = slow_server.get("/dflash2/stats").json()
    assert stats["fake"]["num_steps"] >= 3
    assert stats["server"]["engine_up"] is True
    assert stats["server"]["http_requests_running"] == 1  # this one
    counted = {(row["route"], row["status"]): row["count"] for row in stats["server"]["http_requests"]}
    assert counted["/v1/completions", 200] == 1
    assert counted["/v1/chat/completions", 200] == 0
    assert counted["other", 404] == 1
