"""The ring: places do not overlap, a stale reference is noticed, and a full ring holds up instead of growing."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from dflash2.errors import DeadlineExceeded, IntegrityError, RequestTooLarge
from dflash2.pipeline.handoff import TokenRing, TokenSpan


@dataclass
class Encoded:
    """A tokenizer's result that counts how often the list is asked for."""

    values: list[int]
    num_lists: int = field(default=0)

    @property
    def ids(self) -> list[int]:
        self.num_lists += 1
        return self.values

    def __len__(self) -> int:
        return len(self.values)


async def put(ring: TokenRing, count: int, num_more: int = 0, timeout_s: float = 240) -> TokenSpan:
    return await ring.put(Encoded([7] * count), num_more, timeout_s)


def test_ids_are_written_once_and_everything_else_is_a_view() -> None:
    ring = TokenRing(100)
    encoded = Encoded([5, 6, 7])
    span = asyncio.run(ring.put(encoded, 4, 240))
    assert encoded.num_lists == 1 and ring.num_written == 3
    assert span.prompt.tolist() == [5, 6, 7] and len(span.buffer) == 7
    assert span.prompt.dtype == np.int32
    assert np.shares_memory(span.prompt, ring.view(span.ref))
    lent = span.try_lend()
    assert lent is not None and np.shares_memory(lent, span.buffer)
    assert span.try_lend() is None  # a second writer would write over the first one's answer


def test_a_reference_that_outlived_its_place_is_noticed() -> None:
    ring = TokenRing(10)
    ref = ring.try_take(10)
    assert ref is not None
    ring.release(ref)
    again = ring.try_take(10)
    assert again is not None and (again.offset, again.length) == (ref.offset, ref.length)
    for call in (ring.view, ring.release):
        with pytest.raises(IntegrityError, match="was released"):
            call(ref)


def test_a_full_ring_makes_wait_in_order_and_never_grows() -> None:
    async def main() -> None:
        ring = TokenRing(10)
        first = await put(ring, 8)
        large = asyncio.create_task(put(ring, 9))
        await asyncio.sleep(0)
        small = asyncio.create_task(put(ring, 1))  # would fit, but came later
        for _ in range(5):
            await asyncio.sleep(0)
        assert not large.done() and not small.done()
        await asyncio.to_thread(first.release)
        spans = await asyncio.wait_for(asyncio.gather(large, small), 60)
        assert [len(span.prompt) for span in spans] == [9, 1]
        assert ring.num_held == 10 and ring.num_tokens == 10
        ring.check_integrity()

    asyncio.run(main())


def test_whoever_stops_waiting_leaves_the_line_free() -> None:
    async def main() -> None:
        ring = TokenRing(10)
        first = await put(ring, 8)
        leaves = asyncio.create_task(put(ring, 9))
        await asyncio.sleep(0)
        leaves.cancel()
        with pytest.raises(asyncio.CancelledError):
            await leaves
        second = await asyncio.wait_for(put(ring, 2), 60)
        first.release()
        third = await asyncio.wait_for(put(ring, 8), 60)
        assert ring.num_spans == len({second.ref, third.ref})

    asyncio.run(main())


def test_an_answer_never_makes_wait() -> None:
    async def main() -> None:
        ring = TokenRing(10)
        first = await put(ring, 2, num_more=7)
        beside = await asyncio.wait_for(put(ring, 1, num_more=5), 60)
        assert (len(first.buffer), len(beside.buffer)) == (9, 1)
        first.release()
        alone = await asyncio.wait_for(put(ring, 9, num_more=100), 60)  # more than the ring will ever hold
        assert len(alone.buffer) == 9 and ring.num_waits == 0

    asyncio.run(main())


def test_the_wait_for_room_has_an_end() -> None:
    async def main() -> None:
        ring = TokenRing(10)
        first = await put(ring, 8)
        with pytest.raises(DeadlineExceeded, match=r"a prompt of 9 tokens .* others hold 8 of the 10 tokens"):
            await asyncio.wait_for(put(ring, 9, timeout_s=0.01), 60)
        assert ring.stats()["timeouts"] == 1
        second = await asyncio.wait_for(put(ring, 2), 60)  # and the line is free
        assert ring.num_held == len(first.buffer) + len(second.buffer)

    asyncio.run(main())


def test_what_never_fits_is_refused() -> None:
    with pytest.raises(RequestTooLarge, match=r"11 tokens .* holds 10"):
        TokenRing(10).try_take(11)


def test_a_span_may_be_collected_while_its_ring_is_at_work() -> None:
    """The collector runs where it likes: in the middle of a method that holds the ring's lock, in the same thread."""
    ring = TokenRing(10)
    ref = ring.try_take(10)
    assert ref is not None
    spans = [TokenSpan(ring, ref, 3)]

    def collect() -> None:
        with ring._lock:
            spans.clear()

    thread = threading.Thread(target=collect, daemon=True)
    thread.start()
    thread.join(60)
    assert not thread.is_alive()
    assert ring.num_held == ring.num_spans == 0
    assert ring.try_take(10) is not None


def test_whoever_waits_hears_of_a_span_that_was_dropped() -> None:
    async def main() -> None:
        ring = TokenRing(10)
        span = await put(ring, 8)
        waits = asyncio.create_task(put(ring, 9))
        await asyncio.sleep(0)
        del span
        await asyncio.wait_for(waits, 60)
        ring.check_integrity()

    asyncio.run(main())


class RingMachine(RuleBasedStateMachine):
    """Places come and go in any order, each with its own number written all over it."""

    SIZE = 24

    def __init__(self) -> None:
        super().__init__()
        self.ring = TokenRing(self.SIZE)
        self.spans: list[tuple[int, TokenSpan]] = []
        self.num_taken = 0

    @rule(length=st.integers(1, 12))
    def take(self, length: int) -> None:
        ref = self.ring.try_take(length)
        if ref is None:
            assert not self._has_gap(length)
            return
        self.num_taken += 1
        span = TokenSpan(self.ring, ref, length)
        span.buffer[:] = self.num_taken
        self.spans.append((self.num_taken, span))

    @precondition(lambda self: self.spans)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        _, span = self.spans.pop(data.draw(st.integers(0, len(self.spans) - 1)))
        span.release()

    def _has_gap(self, length: int) -> bool:
        free = np.ones(self.SIZE, np.bool_)
        for _, span in self.spans:
            free[span.ref.offset : span.ref.offset + span.ref.length] = False
        return any(free[start : start + length].all() for start in range(self.SIZE - length + 1))

    @invariant()
    def nobody_writes_over_another(self) -> None:
        self.ring.check_integrity()
        assert all((span.buffer == number).all() for number, span in self.spans)
        assert self.ring.num_held == sum(span.ref.length for _, span in self.spans)


TestRingMachine = RingMachine.TestCase
