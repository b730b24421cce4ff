"""A ``dflash2 serve`` of its own for each variant, and requests sent to it at their times. For ``serving.py``."""

from __future__ import annotations

import asyncio
import json
import random
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from dflash2.bench.client import Sample, first_model

START_S = 120.0
"""How long a server may take to load its model."""
PATIENCE_S = 180.0
"""How long one variant may take."""
WORDS = ("the", "cat", "sat", "on", "mat", "and", "looked", "at", "seven", "blue", "boats", "under", "old", "tree")
"""One token each, with a space in front."""


@dataclass(frozen=True)
class Planned:
    """One request: when it is sent, how long its prompt and its answer are."""

    at_s: float
    prompt_tokens: int
    output_tokens: int


@dataclass(frozen=True)
class Replayed:
    """What came of a plan."""

    samples: list[Sample]
    """In the order of the plan."""
    busy: dict[str, Any]
    """The server's statistics when the first token had come: until then there was no step to hide anything behind."""
    end: dict[str, Any]


@contextmanager
def served(model: str, config: dict[str, Any], context: int) -> Iterator[str]:
    """A server of its own with this configuration; its address."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "config.json")
        file.write_text(json.dumps(config), encoding="utf-8")
        log = Path(folder, "log")
        command = [sys.executable, "-m", "dflash2", "serve", "--model", model, "--config", str(file)]
        command += ["--port", "0", "--max-context", str(context), "--shutdown-grace-s", "1"]
        with log.open("w", encoding="utf-8") as output:
            process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
        try:
            yield _address(process, log)
        finally:
            process.terminate()
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _address(process: subprocess.Popen[bytes], log: Path) -> str:
    for _ in range(round(START_S / 0.2)):  # looks, not a deadline: all of this may be stopped and continued
        if process.poll() is not None:
            break
        found = re.search(r"serving .* on (http://\S+)", log.read_text(encoding="utf-8"))
        if found:
            return found[1]
        time.sleep(0.2)
    sys.exit(f"the server did not start:\n{log.read_text(encoding='utf-8')[-3000:]}")


async def replay(url: str, plan: Sequence[Planned], num_clients: int | None = None) -> Replayed:
    """Send every request at its time and wait for all.

    Args:
        url: of the server.
        plan: what to send.
        num_clients: requests that are open at a time; None for as many as the plan has.
    """
    limits = httpx.Limits(max_connections=None)
    places = asyncio.Semaphore(num_clients or len(plan))
    speaks = asyncio.Event()
    began = time.perf_counter()
    async with httpx.AsyncClient(base_url=url, timeout=PATIENCE_S, limits=limits) as http:
        model = await first_model(http)

        async def one(number: int, planned: Planned) -> Sample:
            await asyncio.sleep(planned.at_s)
            async with places:
                sample = await _complete(http, model, number, planned, began, speaks)
            speaks.set()  # also where it failed, so that nobody waits for ever
            return sample

        async def statistics_once_busy() -> dict[str, Any]:
            await speaks.wait()
            return await _statistics(http)

        busy, *samples = await asyncio.gather(
            statistics_once_busy(), *(one(number, planned) for number, planned in enumerate(plan))
        )
        return Replayed(samples, busy, await _statistics(http))


async def _statistics(http: httpx.AsyncClient) -> dict[str, Any]:
    stats: dict[str, Any] = (await http.get("/dflash2/stats")).json()
    return stats


async def _complete(
    http: httpx.AsyncClient, model: str, number: int, planned: Planned, began: float, speaks: asyncio.Event
) -> Sample:
    """One request without the chat's template, so that its prompt is as long as planned."""
    words = random.Random(number).choices(WORDS, k=planned.prompt_tokens)
    body = {
        "model": model,
        "prompt": "".join(f" {word}" for word in words),
        "max_tokens": planned.output_tokens,
        "ignore_eos": True,
        "temperature": 0,
        "logprobs": 0,  # so that each token is told at once, also one that has no text
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    start, first, usage = time.perf_counter() - began, None, {}
    error = ""
    try:
        async with http.stream("POST", "/v1/completions", json=body) as answer:
            if answer.status_code != 200:
                error = f"{answer.status_code}: {(await answer.aread()).decode()[:200]}"
            async for line in answer.aiter_lines():
                if not line.startswith("data: {"):
                    continue
                event = json.loads(line.removeprefix("data: "))
                error = error or str(event.get("error", ""))
                if first is None and event.get("choices"):
                    first = time.perf_counter() - began
                    speaks.set()
                usage = event.get("usage") or usage
    except (httpx.HTTPError, ValueError) as fault:
        error = f"{type(fault).__name__}: {fault}"
    counts = (usage.get("prompt_tokens", 0), 0, usage.get("completion_tokens", 0))
    return Sample(number, 0, start, first, time.perf_counter() - began, *counts, error=error)
