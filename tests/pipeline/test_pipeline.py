"""Requests go through the stages together, leave in any of them, and are held up where the next is full."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import Iterator

import numpy as np
import pytest
from tests.pipeline.tiny_tokenizer import tiny_hf_tokenizer

from dflash2.errors import QueueFull, RequestError, RequestTooLarge
from dflash2.pipeline.handoff import TokenRing
from dflash2.pipeline.pipeline import Pipeline, TextPrompt
from dflash2.pipeline.tokenizer import Tokenizer


class GatedTokenizer(Tokenizer):
    """Counts its calls, and waits in each of them until the gate is open."""

    def __init__(self) -> None:
        super().__init__(tiny_hf_tokenizer(), num_threads=1)
        self.gate = threading.Event()
        self.gate.set()
        self.batches: list[int] = []

    def encode_batch(self, texts, *, add_special_tokens):  # type: ignore[no-untyped-def]
        self.batches.append(len(texts))
        assert self.gate.wait(240)
        return super().encode_batch(texts, add_special_tokens=add_special_tokens)


@pytest.fixture
def tokenizer() -> Iterator[GatedTokenizer]:
    tokenizer = GatedTokenizer()
    yield tokenizer
    tokenizer.gate.set()
    tokenizer.close()


def text(words: str) -> TextPrompt:
    return TextPrompt(words, len(words), add_special_tokens=False)


def room(count: int) -> int:
    return 5


async def spin() -> None:
    for _ in range(20):
        await asyncio.sleep(0.001)


def assert_idle(pipeline: Pipeline) -> None:
    """Every counter is back at its start."""
    stats = pipeline.stats()
    assert stats["preparing_requests"] == 0
    assert all(stage["queued"] == stage["active"] == 0 for stage in stats["stages"].values())
    gc.collect()
    assert stats["ring"]["held_tokens"] == pipeline.ring.num_held == 0
    pipeline.ring.check_integrity()


def test_a_text_a_chat_and_given_tokens_arrive_in_the_ring(tokenizer: GatedTokenizer) -> None:
    async def main() -> None:
        pipeline = Pipeline(tokenizer, TokenRing(100), ring_timeout_s=240, max_prompt_tokens=10**6)
        rendered = TextPrompt(lambda: "from a thread", 5, add_special_tokens=False)
        spans = await asyncio.gather(
            pipeline.prepare(text("abc"), room), pipeline.prepare(rendered, room), pipeline.prepare([1, 2], room)
        )
        assert [bytes(span.prompt.tolist()) for span in spans] == [b"abc", b"from a thread", b"\x01\x02"]
        assert all(len(span.buffer) == len(span.prompt) + 5 for span in spans)
        assert all(np.shares_memory(span.buffer, pipeline.ring.view(span.ref)) for span in spans)
        for span in spans:
            span.release()
        del spans, span
        assert_idle(pipeline)

    asyncio.run(main())


def test_a_text_that_is_too_long_whatever_it_says_is_not_even_tokenised(tokenizer: GatedTokenizer) -> None:
    async def main() -> None:
        pipeline = Pipeline(tokenizer, TokenRing(100), ring_timeout_s=240, max_prompt_tokens=5)
        longest = len("<|im_start|>")
        with pytest.raises(RequestTooLarge, match="72 characters, which is at least 6 tokens; this model takes"):
            await pipeline.prepare(text("a" * longest * 6), room)
        assert tokenizer.batches == []
        span = await pipeline.prepare(text("a" * 10), room)
        span.release()
        assert_idle(pipeline)

    asyncio.run(main())


def test_what_arrives_together_is_tokenised_together(tokenizer: GatedTokenizer) -> None:
    async def main(*, enabled: bool) -> list[int]:
        tokenizer.batches.clear()
        tokenizer.gate.clear()
        pipeline = Pipeline(tokenizer, TokenRing(1000), ring_timeout_s=240, max_prompt_tokens=10**6, enabled=enabled)
        tasks = [asyncio.create_task(pipeline.prepare(text("x" * n), room)) for n in range(1, 9)]
        await spin()
        tokenizer.gate.set()
        spans = await asyncio.gather(*tasks)
        assert [len(span.prompt) for span in spans] == list(range(1, 9))
        assert pipeline.stats()["stages"]["tokenise"]["done"] == 8
        return tokenizer.batches

    batches = asyncio.run(main(enabled=True))
    assert sum(batches) == 8 and len(batches) <= 3
    assert asyncio.run(main(enabled=False)) == [1] * 8


def test_the_list_of_ids_dies_where_it_is_written(tokenizer: GatedTokenizer) -> None:
    """After the tokenizer there is one copy of a prompt, in the ring, and everybody else refers to it."""
    count = 4_321

    async def main() -> None:
        pipeline = Pipeline(tokenizer, TokenRing(10_000), ring_timeout_s=240, max_prompt_tokens=10**6)
        span = await pipeline.prepare(text("y" * count), room)
        gc.collect()
        lists = [one for one in gc.get_objects() if type(one) is list and len(one) == count]
        assert not lists
        assert pipeline.stats()["ring"]["written_tokens"] == count
        assert np.shares_memory(span.prompt, pipeline.ring.view(span.ref))

    asyncio.run(main())


def test_a_full_ring_holds_requests_up(tokenizer: GatedTokenizer) -> None:
    async def main() -> None:
        pipeline = Pipeline(tokenizer, TokenRing(20), ring_timeout_s=240, max_prompt_tokens=10**6)
        first = await pipeline.prepare(text("x" * 10), room)
        second = asyncio.create_task(pipeline.prepare(text("y" * 10), room))
        await spin()
        assert not second.done() and pipeline.stats()["ring"]["waits"] == 1
        first.release()
        assert (await asyncio.wait_for(second, 60)).prompt.tolist() == [ord("y")] * 10

    asyncio.run(main())


def test_too_many_at_once_are_refused(tokenizer: GatedTokenizer) -> None:
    async def main() -> None:
        tokenizer.gate.clear()
        pipeline = Pipeline(tokenizer, TokenRing(100), ring_timeout_s=240, max_prompt_tokens=10**6, max_requests=2)
        tasks = [asyncio.create_task(pipeline.prepare(text("x"), room)) for _ in range(2)]
        await spin()
        with pytest.raises(QueueFull, match="2 requests are being prepared"):
            await pipeline.prepare(text("z"), room)
        tokenizer.gate.set()
        await asyncio.gather(*tasks)
        await pipeline.prepare(text("z"), room)

    asyncio.run(main())


def test_work_beside_a_running_model_counts_as_hidden(tokenizer: GatedTokenizer) -> None:
    async def main() -> None:
        time_s, busy_s = 0.0, 0.0

        def clock() -> float:
            nonlocal time_s
            time_s += 1.0
            return time_s

        def engine_busy_s() -> float:
            nonlocal busy_s
            busy_s += 0.25
            return busy_s

        pipeline = Pipeline(
            tokenizer,
            TokenRing(100),
            ring_timeout_s=240,
            max_prompt_tokens=10**6,
            engine_busy_s=engine_busy_s,
            clock=clock,
        )
        await pipeline.prepare(text("x"), room)
        stage = pipeline.stats()["stages"]["tokenise"]
        assert (stage["busy_s"], stage["hidden_s"]) == (1.0, 0.25)

    asyncio.run(main())


def refuse(count: int) -> int:
    raise RequestError("too long")


async def leave_everywhere(tokenizer: GatedTokenizer, count: int, seed: int) -> None:
    """Requests that leave after a random while, refused ones among them."""
    rng = np.random.default_rng(seed)
    pipeline = Pipeline(tokenizer, TokenRing(400), ring_timeout_s=240, max_prompt_tokens=10**6, max_requests=10**6)
    kept: list[object] = []

    async def one(number: int) -> None:
        kind = rng.integers(8)
        words = "x" * int(rng.integers(1, 60))
        prompt = (
            [1, 2, 3] if kind % 2 else TextPrompt(words if kind % 4 else lambda: words, 60, add_special_tokens=False)
        )
        for _ in range(int(rng.integers(6))):
            await asyncio.sleep(0)
        asking = pipeline.prepare(prompt, refuse if kind == 7 else room)
        task = asyncio.create_task(asking)
        for _ in range(int(rng.integers(12))):
            await asyncio.sleep(0)
        if rng.integers(4):
            task.cancel()
        try:
            span = await task
        except (asyncio.CancelledError, RequestError):
            return
        if rng.integers(2):
            span.release()
        else:
            kept.append(span)  # dropped without a word, as by a client that leaves between two stages
            kept.pop()

    for start in range(0, count, 50):
        tokenizer.gate.clear()
        leaving = asyncio.gather(*(one(number) for number in range(start, min(start + 50, count))))
        for _ in range(15):
            await asyncio.sleep(0)
        tokenizer.gate.set()
        await leaving
    await spin()
    stages = pipeline.stats()["stages"]
    assert stages["tokenise"]["cancelled"] > 0 and stages["validate"]["cancelled"] > 0
    assert_idle(pipeline)


def test_leaving_in_any_stage_gives_everything_back(tokenizer: GatedTokenizer) -> None:
    asyncio.run(leave_everywhere(tokenizer, 500, seed=1))


@pytest.mark.long
def test_ten_thousand_leave(tokenizer: GatedTokenizer, test_scale: int) -> None:
    asyncio.run(leave_everywhere(tokenizer, 1_000 * test_scale, seed=2))
