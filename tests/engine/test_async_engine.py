from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Awaitable, Callable
from contextlib import aclosing

import numpy as np
import pytest
from tests.engine.fake_engine import Failed, FakeEngine, says

from dflash2.engine.async_engine import AsyncEngine, EngineState
from dflash2.engine.base import FinishReason, GenerationRequest, TokenOutput
from dflash2.engine.sampling import SamplingParams
from dflash2.errors import DeadlineExceeded, EngineStopped, RequestError, RequestTooLarge


def request(name: str = "r", tokens: tuple[int, ...] = (1, 2, 3), max_tokens: int = 5) -> GenerationRequest:
    return GenerationRequest(name, np.array(tokens, np.int32), SamplingParams(max_tokens=max_tokens), 0.0)


async def outputs_of(engine: AsyncEngine, one: GenerationRequest) -> list[TokenOutput]:
    return [output async for output in engine.generate(one)]


async def until(condition: Callable[[], bool]) -> None:
    """Wait for what another thread does."""
    for _ in range(2_000):
        if condition():
            return
        await asyncio.sleep(0.005)
    pytest.fail("it never came true")


def run(fake: FakeEngine, use: Callable[[AsyncEngine], Awaitable[None]], **options: float) -> None:
    """Start an engine, use it, close it."""

    async def main() -> None:
        engine = AsyncEngine(fake, **options)
        await engine.start()
        try:
            await use(engine)
        finally:
            assert await engine.close(60)

    asyncio.run(main())


def test_outputs_arrive_in_order_and_end_with_a_reason() -> None:
    async def use(engine: AsyncEngine) -> None:
        outputs = await outputs_of(engine, request())
        assert [output.token_id for output in outputs] == [1, 2, 3, 1, 2]
        assert [output.finish_reason for output in outputs] == [None] * 4 + [FinishReason.LENGTH]
        assert engine.num_running == 0

    run(FakeEngine(), use)


def test_many_requests_each_get_their_own_tokens() -> None:
    async def use(engine: AsyncEngine) -> None:
        requests = [request(f"r{i}", tokens=(i, i + 1), max_tokens=7 + i) for i in range(40)]
        results = await asyncio.gather(*(outputs_of(engine, one) for one in requests))
        for i, outputs in enumerate(results):
            assert [output.token_id for output in outputs] == [i + k % 2 for k in range(7 + i)]

    run(FakeEngine(), use)


def test_only_the_engines_thread_touches_the_engine() -> None:
    fake = FakeEngine(step_s=0.001)

    async def use(engine: AsyncEngine) -> None:
        async with aclosing(engine.generate(request(max_tokens=1_000))) as outputs:
            await anext(outputs)
        await until(lambda: bool(fake.cancelled) and fake.num_idle > 0)

    run(fake, use, idle_interval_s=0.01)
    assert fake.threads == {"dflash2-engine"}
    assert fake.num_closed == 1


def test_one_callback_per_step_however_many_requests() -> None:
    fake = FakeEngine(gate=threading.Event())

    async def use(engine: AsyncEngine) -> None:
        loop = asyncio.get_running_loop()
        num_callbacks = 0
        original = loop.call_soon_threadsafe

        def counting(*args, **kwargs):
            nonlocal num_callbacks
            num_callbacks += threading.current_thread().name == "dflash2-engine"
            return original(*args, **kwargs)

        loop.call_soon_threadsafe = counting
        tasks = [asyncio.create_task(outputs_of(engine, request(f"r{i}", max_tokens=10))) for i in range(20)]
        await asyncio.sleep(0)
        fake.gate.set()
        await asyncio.gather(*tasks)
        assert 10 <= num_callbacks <= fake.num_steps < 30

    run(fake, use)


def test_closing_the_iterator_cancels_the_request_and_no_other() -> None:
    fake = FakeEngine(step_s=0.001)

    async def use(engine: AsyncEngine) -> None:
        other = asyncio.create_task(outputs_of(engine, request("other", max_tokens=50)))
        async with aclosing(engine.generate(request("left", max_tokens=900))) as outputs:
            await anext(outputs)
            await anext(outputs)
        await until(lambda: "left" not in fake.running)
        assert len(await other) == 50
        assert engine.num_running == 0

    run(fake, use)
    assert fake.cancelled == ["left"]


def test_cancelling_a_waiting_consumer_cancels_the_request() -> None:
    fake = FakeEngine(gate=threading.Event())

    async def use(engine: AsyncEngine) -> None:
        task = asyncio.create_task(outputs_of(engine, request()))
        await until(lambda: bool(fake.added))
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        fake.gate.set()
        await until(lambda: fake.cancelled == ["r"] and not fake.has_work)

    run(fake, use)


def test_a_finished_request_is_not_cancelled() -> None:
    fake = FakeEngine()
    run(fake, lambda engine: outputs_of(engine, request()))
    assert fake.cancelled == []


@pytest.mark.parametrize("error", [RequestTooLarge("never"), RequestError("bad", param="seed")])
def test_a_refused_request_raises_and_the_engine_goes_on(error: Exception) -> None:
    fake = FakeEngine(refuse=lambda one: error if one.request_id == "bad" else None)

    async def use(engine: AsyncEngine) -> None:
        with pytest.raises(type(error)) as caught:
            await outputs_of(engine, request("bad"))
        assert caught.value is error
        assert len(await outputs_of(engine, request("good"))) == 5

    run(fake, use)
    assert fake.cancelled == []


def test_a_failed_request_is_an_output_and_the_engine_goes_on() -> None:
    failure = Failed(RequestError("no"))

    async def use(engine: AsyncEngine) -> None:
        last = (await outputs_of(engine, request("a")))[-1]
        assert last.finish_reason is FinishReason.ERROR
        assert last.error is failure.error
        assert engine.state is EngineState.RUNNING

    run(FakeEngine(says(1, failure)), use)


def test_an_id_in_use_is_refused() -> None:
    async def use(engine: AsyncEngine) -> None:
        async with aclosing(engine.generate(request(max_tokens=900))) as outputs:
            await anext(outputs)
            with pytest.raises(RequestError, match="in use"):
                await outputs_of(engine, request())

    run(FakeEngine(step_s=0.001), use)


@pytest.mark.parametrize("where", ["step", "idle", "add", "stats"])
def test_a_broken_engine_fails_every_request_and_says_so(where: str, caplog: pytest.LogCaptureFixture) -> None:
    fake = FakeEngine(step_s=0.001)

    def broken(*args: object) -> None:
        raise RuntimeError("the device is gone")

    async def use(engine: AsyncEngine) -> None:
        running = [asyncio.create_task(outputs_of(engine, request(f"r{i}", max_tokens=900))) for i in range(3)]
        if where != "idle":
            await until(lambda: len(fake.running) == 3)
        setattr(fake, where, broken)
        if where == "idle":
            for task in running:
                task.cancel()
        if where == "add":
            running.append(asyncio.create_task(outputs_of(engine, request("last"))))
        if where == "stats":
            assert await engine.stats() == {"fake": {"num_steps": 0, "num_running": 0}}
        for result in await asyncio.gather(*running, return_exceptions=True):
            if where == "idle":
                assert isinstance(result, asyncio.CancelledError)
            else:
                assert isinstance(result, EngineStopped)
                assert "the device is gone" in str(result)
        await until(lambda: engine.state is EngineState.DEAD)
        assert "the device is gone" in str(engine.failure)
        with pytest.raises(EngineStopped, match="the device is gone"):
            await outputs_of(engine, request("late"))
        assert (await engine.stats())["fake"]["num_steps"] == 0  # the last that was known

    with caplog.at_level(logging.CRITICAL):
        run(fake, use, idle_interval_s=0.01)
    assert fake.num_closed == 1


def test_the_failure_is_logged_with_its_traceback(caplog: pytest.LogCaptureFixture) -> None:
    async def use(engine: AsyncEngine) -> None:
        with pytest.raises(EngineStopped):
            await outputs_of(engine, request())

    run(FakeEngine(says(1, RuntimeError("the device is gone"))), use)
    record = next(record for record in caplog.records if record.levelno == logging.ERROR)
    assert "the device is gone" in (record.exc_text or "")


def test_close_lets_running_requests_finish_and_refuses_new_ones() -> None:
    fake = FakeEngine(step_s=0.002)

    async def main() -> None:
        engine = AsyncEngine(fake)
        await engine.start()
        running = asyncio.create_task(outputs_of(engine, request(max_tokens=100)))
        await until(lambda: fake.num_steps > 3)
        closing = asyncio.create_task(engine.close(240))
        await until(lambda: engine.state is EngineState.CLOSING)
        with pytest.raises(EngineStopped, match="closing"):
            await outputs_of(engine, request("late"))
        assert (await engine.stats())["fake"]["num_running"] == 1
        assert len(await running) == 100
        assert await closing
        assert engine.state is EngineState.CLOSED
        assert await engine.close(1)

    asyncio.run(main())
    assert fake.cancelled == []
    assert fake.num_closed == 1


def test_close_ends_what_does_not_finish_in_time() -> None:
    fake = FakeEngine(step_s=0.001)

    async def main() -> None:
        engine = AsyncEngine(fake)
        await engine.start()
        running = asyncio.create_task(outputs_of(engine, request(max_tokens=10**9)))
        await until(lambda: fake.num_steps > 3)
        assert await engine.close(0.05)
        with pytest.raises(EngineStopped, match="shutting down"):
            await running

    asyncio.run(main())
    assert fake.cancelled == ["r"]
    assert not fake.has_work
    assert fake.num_closed == 1


def test_an_engine_stuck_in_a_step_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dflash2.engine.async_engine.STOP_TIMEOUT_S", 0.05)
    fake = FakeEngine(gate=threading.Event())

    async def main() -> None:
        engine = AsyncEngine(fake)
        await engine.start()
        running = asyncio.create_task(outputs_of(engine, request()))
        await until(lambda: bool(fake.added))
        assert not await engine.close(0.05)
        with pytest.raises(EngineStopped):
            await running
        fake.gate.set()
        await until(lambda: engine.state is EngineState.CLOSED)

    asyncio.run(main())


def test_an_errand_waits_for_the_step_under_way_within_a_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dflash2.engine.async_engine.ERRAND_TIMEOUT_S", 0.05)
    fake = FakeEngine(gate=threading.Event())

    async def use(engine: AsyncEngine) -> None:
        running = asyncio.create_task(outputs_of(engine, request()))
        await until(lambda: bool(fake.added))
        with pytest.raises(DeadlineExceeded, match="step took longer"):
            await engine.prefetch(np.array([1, 2], np.int32), None, None, 1.0)
        fake.gate.set()
        await running
        await until(lambda: bool(fake.expected))  # it was done all the same

    run(fake, use)


def test_an_engine_that_was_never_started_is_closed() -> None:
    fake = FakeEngine()
    assert asyncio.run(AsyncEngine(fake).close(1))
    assert fake.num_closed == 1


def test_idle_is_called_only_without_work() -> None:
    fake = FakeEngine(step_s=0.001)

    async def use(engine: AsyncEngine) -> None:
        await until(lambda: fake.num_idle >= 3)
        task = asyncio.create_task(outputs_of(engine, request(max_tokens=100)))
        await until(lambda: bool(fake.running))
        before = fake.num_idle
        await task
        assert fake.num_idle <= before + 1

    run(fake, use, idle_interval_s=0.001)


def test_a_step_without_progress_does_not_spin() -> None:
    """While all wait for admission the thread pauses between steps instead of taking a whole core."""
    fake = FakeEngine(says(*[None] * 50, 7, FinishReason.LENGTH))
    pauses: list[float] = []

    async def main() -> None:
        engine = AsyncEngine(fake)
        wake = engine._thread._wake
        original = wake.wait
        wake.wait = lambda timeout: (pauses.append(timeout), original(timeout))[1]
        await engine.start()
        assert len(await outputs_of(engine, request())) == 2
        await engine.close(1)

    asyncio.run(main())
    assert pauses.count(0.001) >= 40


def test_statistics_are_taken_once_for_all_who_ask() -> None:
    fake = FakeEngine()

    async def use(engine: AsyncEngine) -> None:
        before = fake.num_stats
        await asyncio.gather(*(engine.stats() for _ in range(5)))
        assert fake.num_stats == before + 1
        assert (await engine.stats())["fake"]["num_running"] == 0
        assert fake.num_stats == before + 2

    run(fake, use)


@pytest.mark.parametrize(
    ("reason", "error"), [(FinishReason.TIMEOUT, None), (FinishReason.ERROR, None), (FinishReason.STOP, OSError())]
)
def test_an_output_that_failed_says_why(reason: FinishReason, error: Exception | None) -> None:
    with pytest.raises(ValueError, match="an output with"):
        TokenOutput("r", None, reason, 3, 0, error)
