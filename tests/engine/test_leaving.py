"""Requests leave in every stage from the tokenizer to the last token, and every counter is back where it began."""

from __future__ import annotations

import asyncio
import gc
from collections import Counter
from contextlib import aclosing
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from tests.fakes.clock import ManualClock
from tests.fakes.engine_world import LIMITS, EngineWorld
from tests.fakes.hash_model import answer
from tests.pipeline.tiny_tokenizer import tiny_hf_tokenizer

from dflash2.engine.async_engine import AsyncEngine
from dflash2.engine.base import FinishReason, GenerationRequest, RequestHints
from dflash2.engine.promises import Reserve
from dflash2.engine.sampling import SamplingParams
from dflash2.errors import QueueFull
from dflash2.pipeline.handoff import TokenRing
from dflash2.pipeline.pipeline import GivenTokens, Pipeline, TextPrompt
from dflash2.pipeline.tokenizer import Tokenizer
from dflash2.types import Tier


class RunningClock(ManualClock):
    """Goes on by itself a little whenever somebody looks."""

    def __call__(self) -> float:
        self.now += 1e-3
        return self.now


def world(slots: tuple[int, int, int], cutoff: float | None, reserve: Reserve = "estimate") -> EngineWorld:
    limits = replace(LIMITS, quantum_tokens=2, admission_timeout_s=3.0, max_waiting=30)
    made = EngineWorld(slots, limits=limits, clock=RunningClock(), smoothing_cutoff=cutoff, reserve=reserve)
    made.transfer.prompt = True
    return made


async def leave(made: EngineWorld, count: int, seed: int) -> Counter[str]:
    """``count`` requests, many of which leave at a random moment; what became of them."""
    rng = np.random.default_rng(seed)
    tokenizer = Tokenizer(tiny_hf_tokenizer(), num_threads=1)
    ring = TokenRing(300)
    engine = AsyncEngine(made.engine)
    await engine.start()
    pipeline = Pipeline(
        tokenizer,
        ring,
        ring_timeout_s=240,
        max_prompt_tokens=engine.max_context_tokens - 1,
        engine_busy_s=engine.busy_s,
    )
    ends: Counter[str] = Counter()

    async def serve(number: int, num_prompt: int, num_new: int) -> str:
        words = "".join(chr(int(one)) for one in rng.integers(1, 49, num_prompt))
        prompt = TextPrompt(words, num_prompt, add_special_tokens=False)
        span = await pipeline.prepare(prompt, lambda n: num_new)
        hints = RequestHints(priority=int(rng.integers(-1, 2)))
        sampling = SamplingParams(max_tokens=num_new, temperature=0.0)
        request = GenerationRequest(f"q{number}", span.prompt, sampling, made.clock(), hints=hints, span=span)
        del span
        last: Any = None
        async with aclosing(engine.generate(request)) as outputs:
            async for output in outputs:
                last = output
        return str(last.finish_reason.value)

    async def one(number: int) -> None:
        num_prompt, num_new = int(rng.integers(1, 30)), int(rng.integers(1, 9))
        task = asyncio.create_task(serve(number, num_prompt, num_new))
        if rng.integers(3):
            await asyncio.sleep(float(rng.exponential(0.01)))
            task.cancel()
        try:
            ends[await task] += 1
        except asyncio.CancelledError:
            ends["left"] += 1
        except QueueFull:
            ends["refused"] += 1

    for start in range(0, count, 60):
        await asyncio.gather(*(one(number) for number in range(start, min(start + 60, count))))
    while (await engine.stats())["scheduler"]["waiting_requests"] or made.engine.has_work:
        await asyncio.sleep(0.001)
    assert engine.num_running == 0
    stages = {**pipeline.stats()["stages"], **(await engine.stats())["scheduler"]["stages"]}
    assert await engine.close(60)
    tokenizer.close()
    assert all(stage["queued"] == stage["active"] == 0 for stage in stages.values()), stages
    gc.collect()
    assert ring.num_held == 0
    ring.check_integrity()
    return ends


def check_back_at_start(made: EngineWorld) -> None:
    runtime, table = made.runtime, made.runtime.cache.table
    runtime.cache.check_integrity()
    runtime.ledger.check_integrity()
    assert not made.scheduler.every()
    assert runtime.ledger.num_promised == runtime.ledger.num_requests == runtime.cache.residency.num_promised == 0
    assert len(runtime.prompts.arrivals) == 0
    assert not table.ref_count.any() and not table.pin_count.any() and not table.busy.any()
    runtime.flush()
    assert all(table.num_used(tier) == 0 for tier in Tier)


@pytest.mark.parametrize("slots", [(12, 20, 0), (12, 0, 0)])
def test_engine_and_memory_manager_read_tokens_where_the_tokenizer_wrote_them(slots: tuple[int, int, int]) -> None:
    made = world(slots, None)
    ring = TokenRing(100)
    span = asyncio.run(ring.put(GivenTokens([3, 1, 4, 1, 5, 9]), 8, 240))
    sampling = SamplingParams(max_tokens=8, temperature=0.0)
    made.engine.add(GenerationRequest("q", span.prompt, sampling, made.clock(), span=span))
    memory = ring.view(span.ref)
    said: list[int] = []
    while made.engine.has_work:
        for output in made.engine.step():
            said += [] if output.token_id is None else [output.token_id]
        for state in made.scheduler.resident:
            assert np.shares_memory(state.tokens, memory) and np.shares_memory(state.blocks.tokens, memory)
    assert memory.tolist() == [3, 1, 4, 1, 5, 9, *said]
    assert said == answer([3, 1, 4, 1, 5, 9], 8)
    assert ring.num_written == 6  # once; the answer is the engine's


def test_where_the_ring_has_no_room_for_an_answer_it_stands_elsewhere() -> None:
    made = world((12, 20, 0), None)
    span = asyncio.run(TokenRing(6).put(GivenTokens([3, 1, 4, 1, 5, 9]), 8, 240))
    assert len(span.buffer) == 6
    sampling = SamplingParams(max_tokens=8, temperature=0.0)
    made.engine.add(GenerationRequest("q", span.prompt, sampling, made.clock(), span=span))
    said: list[int] = []
    while made.engine.has_work:
        said += [output.token_id for output in made.engine.step() if output.token_id is not None]
    assert said == answer([3, 1, 4, 1, 5, 9], 8)
    assert span.prompt.tolist() == [3, 1, 4, 1, 5, 9]


@pytest.mark.parametrize("cutoff", [None, 0.05])
@pytest.mark.parametrize("slots", [(12, 20, 0), (12, 6, 12), (12, 0, 0)])
def test_leaving_anywhere_gives_everything_back(slots: tuple[int, int, int], cutoff: float | None) -> None:
    made = world(slots, cutoff)
    ends = asyncio.run(leave(made, 180, seed=1))
    assert ends["left"] > 0 and ends[FinishReason.LENGTH.value] > 0
    check_back_at_start(made)


@pytest.mark.parametrize("reserve", ["prompt", "max_tokens"])
def test_however_much_is_reserved(reserve: Reserve) -> None:
    made = world((12, 4, 4), 0.05, reserve)
    ends = asyncio.run(leave(made, 180, seed=3))
    assert ends["left"] > 0 and ends[FinishReason.LENGTH.value] > 0
    check_back_at_start(made)


@pytest.mark.long
def test_ten_thousand_leave(test_scale: int) -> None:
    made = world((12, 6, 12), 0.05)
    asyncio.run(leave(made, 1_000 * test_scale, seed=2))
    check_back_at_start(made)
