"""The server over the real engine and the real model, with less HBM than the load needs."""

from __future__ import annotations

import asyncio
import json
import random
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import openai
import pytest
import uvicorn
from prometheus_client.parser import text_string_to_metric_families

from dflash2.config import parse_config
from dflash2.engine.async_engine import AsyncEngine
from dflash2.engine.engine import ReferenceEngine
from dflash2.engine.factory import assemble_engine
from dflash2.engine.model_loader import load_model, load_tokenizer
from dflash2.errors import IntegrityError
from dflash2.monitoring.prometheus import METRICS
from dflash2.pipeline.chat import ChatRenderer
from dflash2.pipeline.handoff import TokenRing
from dflash2.pipeline.pipeline import Pipeline
from dflash2.pipeline.tokenizer import Tokenizer
from dflash2.server.app import create_app
from dflash2.server.context import ServerContext, ServerSettings
from dflash2.server.generation import Frontend

pytestmark = pytest.mark.e2e

MODEL = "smollm2"
CONFIG = {
    "enable": True,
    "memory": {"hbm_capacity_mb": 48, "dram_capacity_mb": 256, "nvme_capacity_mb": 0, "staging_buffer_size_mb": 16},
    "kv_block": {"block_size": 16},
    "scheduling": {"smoothing": False},  # swapping is what is tested
}
WORDS = ["the", "cat", "sat", "on", "a", "mat", "and", "looked", "at", "seven", "blue", "boats", "under", "an", "old"]


@dataclass
class Server:
    url: str
    engine: ReferenceEngine
    context: ServerContext

    def post(self, path: str, body: object) -> httpx.Response:
        return httpx.post(self.url + path, json=body, timeout=240)


def until(condition: Callable[[], bool]) -> None:
    for _ in range(4_000):
        if condition():
            return
        time.sleep(0.01)
    pytest.fail("it never came true")


@pytest.fixture(scope="module")
def server(model_path: Path) -> Iterator[Server]:
    tokenizer = Tokenizer(load_tokenizer(model_path))
    engine = assemble_engine(load_model(model_path), parse_config(json.dumps(CONFIG)), 2_048)
    async_engine = AsyncEngine(engine)
    pipeline = Pipeline(
        tokenizer, TokenRing(1 << 18), ring_timeout_s=240, max_prompt_tokens=10**6, engine_busy_s=async_engine.busy_s
    )
    frontend = Frontend(async_engine, tokenizer, ChatRenderer(tokenizer.hf), pipeline)
    context = ServerContext(ServerSettings((MODEL,)), async_engine, frontend)
    listener = socket.create_server(("127.0.0.1", 0))
    web = uvicorn.Server(uvicorn.Config(create_app(context), log_level="error", timeout_graceful_shutdown=5))
    thread = threading.Thread(target=web.run, kwargs={"sockets": [listener]})
    thread.start()
    try:
        until(lambda: web.started)
        yield Server(f"http://127.0.0.1:{listener.getsockname()[1]}", engine, context)
    finally:
        web.should_exit = True
        thread.join(60)
        tokenizer.close()
    assert not thread.is_alive()


@pytest.fixture
def client(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=240) as client:
        yield client


@pytest.fixture(autouse=True)
def nothing_is_left(server: Server) -> Iterator[None]:
    """After each test the engine is idle, holds nothing for any request, and all its invariants hold."""
    yield
    until(lambda: server.context.engine.num_running == 0 and server.context.traffic.num_running == 0)
    results: list[IntegrityError | dict] = []

    def look() -> None:
        try:
            server.engine.check_integrity()
            results.append({"work": server.engine.has_work, **server.engine.stats()})
        except IntegrityError as error:  # handed to the test's thread
            results.append(error)

    for _ in range(4_000):
        server.context.engine._thread.submit(look)  # between two steps, in the engine's thread
        until(lambda: bool(results))
        found = results.pop()
        if isinstance(found, IntegrityError):
            raise found
        if not found["work"]:
            break
        time.sleep(0.01)
    assert (found["reserved_blocks"], found["pinned_blocks"]) == (0, 0)
    assert [found["scheduler"][f"{state}_requests"] for state in ("waiting", "paused", "resident")] == [0, 0, 0]


def words(seed: int, count: int) -> str:
    return " ".join(random.Random(seed).choices(WORDS, k=count))


def greedy(client: openai.OpenAI, prompt: str, max_tokens: int) -> str:
    answer = client.completions.create(model=MODEL, prompt=prompt, max_tokens=max_tokens, temperature=0)
    return answer.choices[0].text


def test_chat(client: openai.OpenAI) -> None:
    messages = [{"role": "user", "content": "What is the capital of France? Answer in one short sentence."}]
    options = {"model": MODEL, "messages": messages, "temperature": 0, "max_tokens": 40}
    answer = client.chat.completions.create(**options)
    assert "Paris" in answer.choices[0].message.content
    assert answer.choices[0].finish_reason == "stop"
    assert "<|im_end|>" not in answer.choices[0].message.content
    chunks = list(client.chat.completions.create(**options, stream=True))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == answer.choices[0].message.content


def test_a_repeated_prompt_is_cached_but_not_for_another_tenant(client: openai.OpenAI) -> None:
    prompt = words(1, 100)

    def cached(**options: object) -> int:
        answer = client.completions.create(model=MODEL, prompt=prompt, max_tokens=1, temperature=0, **options)
        return answer.usage.prompt_tokens_details.cached_tokens

    assert cached() == 0
    assert cached() >= 64
    assert cached(extra_body={"cache_salt": "tenant"}) == 0
    assert cached(extra_body={"cache_salt": "tenant"}) >= 64


def test_a_stop_string_and_a_seed(client: openai.OpenAI) -> None:
    text = greedy(client, "One, two, three, four,", 24)
    stop = text[6:9]
    answer = client.completions.create(
        model=MODEL, prompt="One, two, three, four,", max_tokens=24, temperature=0, stop=stop
    )
    assert answer.choices[0].text == text[: text.find(stop)]
    assert answer.choices[0].finish_reason == "stop"
    drawn = [
        client.completions.create(model=MODEL, prompt="Once", max_tokens=8, temperature=1, seed=seed).choices[0].text
        for seed in (7, 7, 8)
    ]
    assert drawn[0] == drawn[1] != drawn[2]


def test_many_clients_a_third_of_which_leave(server: Server, client: openai.OpenAI) -> None:
    """32 streams with prompts from 4 to 200 words, more than fit HBM together."""
    lengths = random.Random(5).sample([4, 6, 9, 14, 20, 30, 45, 70, 100, 120, 150, 200] * 3, 32)
    prompts = [words(100 + i, length) for i, length in enumerate(lengths)]
    before = server.engine.stats()["counters"]

    async def one(web: openai.AsyncOpenAI, i: int) -> str | None:
        stream = await web.completions.create(
            model=MODEL, prompt=prompts[i], max_tokens=16, temperature=0, stream=True, extra_body={"ignore_eos": True}
        )
        text, num_chunks = "", 0
        async for chunk in stream:
            text += chunk.choices[0].text
            num_chunks += 1
            if i % 3 == 2 and num_chunks > i % 5:
                await stream.close()
                return None
        assert chunk.choices[0].finish_reason == "length"
        return text

    async def main() -> list[str | None]:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="x", max_retries=0, timeout=280) as web:
            return await asyncio.gather(*(one(web, i) for i in range(32)))

    texts = asyncio.run(main())
    assert sum(text is None for text in texts) == 10
    after = server.engine.stats()["counters"]
    assert after["swap_out_blocks"] > before["swap_out_blocks"], "the load was meant not to fit HBM"
    for i in (0, 12, 30):
        again = client.completions.create(
            model=MODEL, prompt=prompts[i], max_tokens=16, temperature=0, extra_body={"ignore_eos": True}
        )
        assert again.choices[0].text == texts[i], f"client {i} got another text than a client alone"


@pytest.mark.parametrize(
    ("body", "status", "code"),
    [
        ({"prompt": "x", "temperature": -1}, 400, "invalid_value"),
        ({"prompt": []}, 400, None),
        ({"prompt": [10**6]}, 400, None),
        ({"prompt": "word " * 3_000}, 400, "context_length_exceeded"),
        ({"prompt": "x", "max_tokens": 5_000}, 400, "context_length_exceeded"),
        ({"prompt": "x" * 1_000_000}, 400, "context_length_exceeded"),
        ({"prompt": "x", "model": "other"}, 404, "model_not_found"),
        ({"prompt": "x", "suffix": "y"}, 400, "unsupported_parameter"),
        ({"prompt": "x" * 9_000_000}, 413, "body_too_large"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_bad_input(server: Server, body: dict, status: int, code: str | None) -> None:
    answer = server.post("/v1/completions", {"model": MODEL, **body})
    assert (answer.status_code, answer.json()["error"]["code"]) == (status, code)


def test_every_metric_has_its_place_in_the_statistics(server: Server) -> None:
    stats = httpx.get(f"{server.url}/dflash2/stats").json()
    absent = set()
    for series in METRICS:
        histogram = series.kind == "histogram"
        for path in [(*series.path, "count")] if histogram else [path for _, path in series.places()]:
            value = stats
            for key in path:
                value = value.get(key, {})
            if not isinstance(value, (int, float)):
                absent.add(path[0])
    assert absent == {"adapters", "nvme", "disk"}, "this server has none of these: they are reported as zero"
    families = text_string_to_metric_families(httpx.get(f"{server.url}/metrics").text)
    values = {sample.name: sample.value for family in families for sample in family.samples if not sample.labels}
    assert values["dflash2_engine_up"] == 1
    assert values["dflash2_computed_tokens_total"] > 0
