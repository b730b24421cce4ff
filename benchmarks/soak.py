"""A server at a steady load for a long time: does its memory grow?

    python benchmarks/soak.py --model MODEL.gguf [--minutes 30] [--load 0.8] [--json FILE]

Finds out for a minute how many requests a second the server finishes, then sends that many times ``--load``, at
random times and of random lengths, a third with a prompt seen before, HBM for a quarter of 60 of them. Prints the
server's resident memory every 30 s. The process may be stopped and continued meanwhile.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import signal
import sys
import time
from pathlib import Path
from typing import Any

import httpx
import psutil
from serving_client import WORDS, Planned, served
from serving_load import configuration

from dflash2.bench.client import ChatClient, Sample, first_model

PROBE_S = 60.0
PROBE_REQUESTS = 20
LIMITS = httpx.Limits(max_connections=None)


def prompt_of(number: int, num_tokens: int) -> list[dict[str, str]]:
    words = random.Random(number).choices(WORDS, k=num_tokens)
    return [{"role": "user", "content": " ".join(words)}]


class Stopwatch:
    """Seconds without those for which all of this was stopped: no more than one from look to look."""

    def __init__(self) -> None:
        self._last = time.monotonic()
        self._passed = 0.0

    def passed_s(self) -> float:
        now = time.monotonic()
        self._passed, self._last = self._passed + min(1.0, now - self._last), now
        return self._passed


class Load:
    """Requests of 20 to 400 tokens, answers of 4 to 40."""

    def __init__(self, client: ChatClient) -> None:
        self._client = client
        self._rng = random.Random(0)
        self.done: list[Sample] = []
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def num_open(self) -> int:
        return len(self._tasks)

    def begin(self) -> None:
        number = self._rng.randrange(30) if self._rng.random() < 1 / 3 else self._rng.randrange(10**9)
        size = round(20 * 20 ** random.Random(number).random())
        task = asyncio.create_task(self._one(number, size, self._rng.randint(4, 40)))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _one(self, number: int, size: int, answer: int) -> None:
        self.done.append((await self._client.ask(number, 0, prompt_of(number, size), answer))[0])

    async def finish(self) -> None:
        await asyncio.gather(*self._tasks)


async def run(url: str, server: psutil.Process, minutes: float, share: float) -> dict[str, Any]:
    async with httpx.AsyncClient(base_url=url, timeout=None, limits=LIMITS) as http:
        client = ChatClient(http, await first_model(http), {"ignore_eos": True}, time.perf_counter())
        load = Load(client)
        probe = Stopwatch()
        while (passed := probe.passed_s()) < PROBE_S or len(load.done) < PROBE_REQUESTS:
            while load.num_open < 12:
                load.begin()
            await asyncio.sleep(0.05)
        rate = len(load.done) / passed
        await load.finish()
        pace = random.Random(1)
        watch, next_note, memory = Stopwatch(), 0.0, []
        while (passed := watch.passed_s()) < 60 * minutes:
            if passed >= next_note:
                memory.append((round(passed), round(server.memory_info().rss / 2**20)))
                print(f"{passed:5.0f} s  {memory[-1][1]} MB, {load.num_open} open, {len(load.done)} done", flush=True)
                next_note = passed + 30
            if load.num_open < 60:  # after a pause of the whole process
                load.begin()
            await asyncio.sleep(pace.expovariate(share * rate))
        await load.finish()
        stats = (await http.get("/dflash2/stats")).json()
    return {
        "requests_per_s": rate * share,
        "num_done": len(load.done),
        "errors": sorted({sample.error for sample in load.done if sample.error}),
        "memory_mb": memory,
        "reserved_blocks": stats["reserved_blocks"],
        "pinned_blocks": stats["pinned_blocks"],
        "swap_bytes": stats["counters"]["swap_in_bytes"] + stats["counters"]["swap_out_bytes"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--load", type=float, default=0.8)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    patient = {"scheduling": {"admission_timeout_s": 3600.0}}
    config = configuration([Planned(0.0, 160, 20)] * 60, 4.0, 8, patient)
    with served(args.model, config, 1024) as url:
        (server,) = psutil.Process().children()
        result = asyncio.run(run(url, server, args.minutes, args.load))
    print(json.dumps(result))
    if args.json:
        args.json.write_text(json.dumps(result, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
