"""Runs all conversations, so many at a time, and watches the server meanwhile."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import httpx

from dflash2.bench.client import ChatClient, Sample, first_model
from dflash2.bench.workload import Session

WATCH_INTERVAL_S = 1.0
COUNTED = (
    "swap_in_blocks",
    "swap_out_blocks",
    "demoted_to_nvme_blocks",
    "loaded_from_nvme_blocks",
    "recomputed_tokens",
)


@dataclass(frozen=True, slots=True)
class Target:
    """Which server, and how it is asked.

    Attributes:
        url: without ``/v1``.
        model: None for the first that the server names.
        api_key: None where none is asked for.
        more: further fields of each request.
        timeout_s: longest silence of the server.
    """

    url: str
    model: str | None = None
    api_key: str | None = None
    more: dict[str, Any] = field(default_factory=dict)
    timeout_s: float = 600.0


@dataclass(slots=True)
class Run:
    """What was measured so far; complete when ``run_load`` returns.

    Attributes:
        samples: in the order in which they ended.
        activity: the server's counters since the start of the run, second by second: ``time_s`` and ``COUNTED``. Empty
            for servers that do not tell.
        num_running: requests under way.
        wall_s: of the whole run.
    """

    samples: list[Sample] = field(default_factory=list)
    activity: list[dict[str, float]] = field(default_factory=list)
    num_running: int = 0
    wall_s: float = 0.0
    model: str = ""


async def run_load(target: Target, sessions: list[Session], concurrency: int, on_change: Callable[[Run], None]) -> Run:
    """Ask everything.

    Args:
        target: the server.
        sessions: started in order, none before its ``start_s``.
        concurrency: sessions at the same time.
        on_change: called when a request ends and when the server was looked at.

    Raises:
        DFlash2Error: the server names no model.
    """
    run = Run()
    headers = {} if target.api_key is None else {"Authorization": f"Bearer {target.api_key}"}
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=concurrency + 2)
    timeout = httpx.Timeout(target.timeout_s, connect=30.0)
    async with httpx.AsyncClient(base_url=target.url, headers=headers, limits=limits, timeout=timeout) as http:
        run.model = target.model or await first_model(http)
        began = time.perf_counter()
        client = ChatClient(http, run.model, target.more, began)
        watching = asyncio.create_task(_watch(http, began, run, on_change))
        free = asyncio.Semaphore(concurrency)
        talking: list[asyncio.Task[None]] = []
        try:
            for number, session in enumerate(sessions):
                await asyncio.sleep(max(0.0, session.start_s - (time.perf_counter() - began)))
                await free.acquire()
                talking.append(asyncio.create_task(_converse(client, number, session, run, on_change)))
                talking[-1].add_done_callback(lambda _: free.release())
            await asyncio.gather(*talking)
            run.wall_s = time.perf_counter() - began
            await asyncio.sleep(WATCH_INTERVAL_S)  # the last counters
        finally:
            for task in (watching, *talking):
                task.cancel()
            await asyncio.gather(watching, *talking, return_exceptions=True)
    return run


async def _converse(
    client: ChatClient, number: int, session: Session, run: Run, on_change: Callable[[Run], None]
) -> None:
    messages = [{"role": "system", "content": session.system}] if session.system else []
    for turn, question in enumerate(session.turns):
        messages.append({"role": "user", "content": question.text})
        run.num_running += 1
        sample, answer = await client.ask(number, turn, messages, question.max_tokens)
        run.num_running -= 1
        run.samples.append(sample)
        on_change(run)
        if sample.error:
            return
        messages.append({"role": "assistant", "content": answer})


async def _watch(http: httpx.AsyncClient, began: float, run: Run, on_change: Callable[[Run], None]) -> None:
    """Read the server's own counters until cancelled, or until it turns out that it has none."""
    first: dict[str, float] | None = None
    while True:
        try:
            answer = await http.get("/dflash2/stats")
            counters = answer.json()["counters"] if answer.status_code == 200 else None
        except (httpx.HTTPError, ValueError, LookupError):
            counters = None
        if counters is None and first is None:
            return
        if counters is not None:
            now = {name: float(counters.get(name, 0)) for name in COUNTED}
            first = first or now
            grown = {name: now[name] - first[name] for name in COUNTED}
            run.activity.append({"time_s": time.perf_counter() - began, **grown})
            on_change(run)
        await asyncio.sleep(WATCH_INTERVAL_S)
