"""Whatever is called in whatever order: no wrong KV, no lost slot, no promise broken."""

from __future__ import annotations

import random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from tests.fakes.cache_world import ROOTS, CacheWorld, Request

SIZES = {"three tiers": (8, 5, 9), "no DRAM": (8, 0, 12), "no NVMe": (9, 8, 0), "HBM only": (10, 0, 0)}
COMMON = [1, 1, 2, 1, 2, 2, 1, 1, 2, 1]
"""Prompts are prefixes of it with an ending of their own: hits happen."""
BITS = 16


class CacheMachine(RuleBasedStateMachine):
    """Drives a ``CacheWorld``; subclasses say which."""

    slots: tuple[int, int, int]
    policy: str
    num_steps = 0

    @initialize(block_size=st.integers(2, 4))
    def start(self, block_size: int) -> None:
        self.world = CacheWorld(self.slots, block_size, self.policy)

    def pick(self, index: int) -> Request:
        return self.world.requests[index % len(self.world.requests)]

    def some(self, mask: int) -> list[Request]:
        return [request for i, request in enumerate(self.world.requests) if mask >> i & 1]

    def has_requests(self) -> bool:
        return bool(self.world.requests)

    def has_flights(self) -> bool:
        return bool(self.world.transfer.flights)

    @rule(shared=st.integers(0, 10), ending=st.integers(1, 3), script=st.integers(1, 10), root=st.sampled_from(ROOTS))
    def open(self, shared: int, ending: int, script: int, root: bytes) -> None:
        self.world.open([*COMMON[:shared], ending], [1 + (i * ending) % 2 for i in range(script)], root)

    @precondition(has_requests)
    @rule(index=st.integers(0, 7), script=st.lists(st.integers(1, 2), min_size=1, max_size=6))
    def fork(self, index: int, script: list[int]) -> None:
        self.world.fork(self.pick(index), script)

    @precondition(has_requests)
    @rule(index=st.integers(0, 7))
    def join(self, index: int) -> None:
        self.world.join(self.pick(index))

    @precondition(has_requests)
    @rule(index=st.integers(0, 7), growth=st.integers(0, 9))
    def enter(self, index: int, growth: int) -> None:
        self.world.try_enter(self.pick(index), growth)

    @precondition(has_requests)
    @rule(index=st.integers(0, 7))
    def advance_entering(self, index: int) -> None:
        self.world.advance_entering(self.pick(index))

    @precondition(has_requests)
    @rule(index=st.integers(0, 7), count=st.integers(1, 7))
    def write(self, index: int, count: int) -> None:
        self.world.write(self.pick(index), count)

    @precondition(has_requests)
    @rule(index=st.integers(0, 7), count=st.integers(1, 7))
    def crash(self, index: int, count: int) -> None:
        self.world.write(self.pick(index), count, crash=True)

    @precondition(has_requests)
    @rule(index=st.integers(0, 7), growth=st.integers(0, 9), count=st.integers(1, 7))
    def settle(self, index: int, growth: int, count: int) -> None:
        request = self.pick(index)
        if self.world.settle_enter(request, growth):
            self.world.settle_write(request, count)

    @precondition(has_requests)
    @rule(index=st.integers(0, 7))
    def leave(self, index: int) -> None:
        self.world.leave(self.pick(index))

    @precondition(has_requests)
    @rule(index=st.integers(0, 7))
    def close(self, index: int) -> None:
        self.world.close(self.pick(index))

    @precondition(has_requests)
    @rule(index=st.integers(0, 7), give_up_loads=st.booleans())
    def recover(self, index: int, give_up_loads: bool) -> None:
        self.world.recover(self.pick(index), give_up_loads=give_up_loads)

    @precondition(has_requests)
    @rule(index=st.integers(0, 7), wait_s=st.floats(0, 100))
    def expect(self, index: int, wait_s: float) -> None:
        self.world.cache.residency.expect(self.pick(index).sequence, self.world.now + wait_s)

    @rule(mask=st.integers(0, 255))
    def rebalance(self, mask: int) -> None:
        self.world.rebalance(self.some(mask))

    @rule(mask=st.integers(0, 255))
    def prefetch(self, mask: int) -> None:
        self.world.prefetch(self.some(mask))

    @precondition(has_flights)
    @rule(index=st.integers(0, 7), poll=st.booleans())
    def copy_ends(self, index: int, poll: bool) -> None:
        tickets = self.world.transfer.in_flight
        self.world.transfer.end(tickets[index % len(tickets)])
        if poll:
            self.world.poll()

    @precondition(has_flights)
    @rule(index=st.integers(0, 7), ok=st.integers(0, BITS - 1), bad=st.integers(0, BITS - 1))
    def copy_fails(self, index: int, ok: int, bad: int) -> None:
        tickets = self.world.transfer.in_flight
        ticket = tickets[index % len(tickets)]
        job = self.world.transfer.flights[ticket].job
        count = range(len(job.src_slots))
        # HBM has no checksum: a copy out of it may fail but never condemns its source.
        bad = bad if job.src else 0
        self.world.transfer.end(ticket, [bool(ok >> i & 1) for i in count], [bool(bad >> i & 1) for i in count])
        self.world.poll()

    @rule()
    def poll(self) -> None:
        self.world.poll()

    @rule(seconds=st.floats(0.01, 30))
    def wait(self, seconds: float) -> None:
        self.world.clock.advance(seconds)

    @rule()
    def forget(self) -> None:
        self.world.cache.forget_all()

    @invariant()
    def holds(self) -> None:
        type(self).num_steps += 1
        self.world.check()

    def teardown(self) -> None:
        self.world.check_all_given_back()


@pytest.mark.parametrize("policy", ["heat", "lru"])
@pytest.mark.parametrize("sizes", SIZES)
def test_random_calls_found_by_hypothesis(policy: str, sizes: str, test_scale: int) -> None:
    machine = type("Machine", (CacheMachine,), {"slots": SIZES[sizes], "policy": policy, "num_steps": 0})
    run_state_machine_as_test(machine, settings=settings(max_examples=40 * test_scale, stateful_step_count=40))
    assert machine.num_steps > 500 * test_scale


@pytest.mark.long
@pytest.mark.parametrize("policy", ["heat", "lru"])
@pytest.mark.parametrize("sizes", SIZES)
def test_a_long_walk_through_full_tiers(policy: str, sizes: str, test_scale: int) -> None:
    """Hypothesis starts anew all the time; a walk gets to where everything is full and stays there."""
    for seed in range(test_scale):
        walk(CacheWorld(SIZES[sizes], 2 + seed % 3, policy), random.Random(seed), num_steps=1_500)


def walk(world: CacheWorld, rng: random.Random, num_steps: int) -> None:
    often = {"open": 8, "join": 4, "enter": 8, "advance": 8, "write": 10, "leave": 5, "end": 8, "settle": 3}
    seldom = ["fail", "close", "recover", "expect", "wait"]
    weights = {**often, "rebalance": 3, "prefetch": 2, "crash": 2, "fork": 2} | dict.fromkeys(seldom, 1)
    steps = list(weights)
    for _ in range(num_steps):
        step(world, rng, rng.choices(steps, list(weights.values()))[0])
        world.check()
    world.check_all_given_back()


def step(world: CacheWorld, rng: random.Random, name: str) -> None:
    if name == "open" or not world.requests:
        ending = rng.randint(1, 3)
        script = [1 + (i * ending) % 2 for i in range(rng.randint(1, 12))]
        world.open([*COMMON[: rng.randint(0, 10)], ending], script, rng.choice([*ROOTS, ROOTS[0], ROOTS[0]]))
        return
    request = rng.choice(world.requests)
    if name == "write":
        world.write(request, rng.randint(1, 6))
        if not world.left(request):
            world.close(request)
    elif name == "join":
        world.join(request)
    elif name == "enter":
        world.try_enter(request, rng.randint(0, 6))
    elif name == "advance":
        for one in world.requests:
            world.advance_entering(one)
    elif name in ("end", "fail"):
        copy_ends(world, rng, fails=name == "fail")
    elif name == "settle":
        if world.settle_enter(request, rng.randint(0, 6)):
            world.settle_write(request, rng.randint(1, 4))
    elif name == "leave":
        world.leave(request)
    elif name == "rebalance":
        world.rebalance(world.requests[::2])
    elif name == "prefetch":
        world.prefetch(world.requests[::-1])
    elif name == "crash":
        world.write(request, rng.randint(1, 6), crash=True)
    elif name == "fork":
        world.fork(request, [rng.randint(1, 2) for _ in range(rng.randint(1, 6))])
    elif name == "close":
        world.close(request)
    elif name == "recover":
        world.recover(request, give_up_loads=rng.random() < 0.3)
    elif name == "expect":
        world.cache.residency.expect(request.sequence, world.now + rng.random() * 30)
    elif name == "wait":
        world.clock.advance(rng.random() * 10)


def copy_ends(world: CacheWorld, rng: random.Random, *, fails: bool) -> None:
    tickets = world.transfer.in_flight
    if tickets:
        ticket = rng.choice(tickets)
        job = world.transfer.flights[ticket].job
        ok = [not fails or rng.random() < 0.5 for _ in job.src_slots]
        bad = [bool(job.src) and rng.random() < 0.3 for _ in job.src_slots]
        world.transfer.end(ticket, ok, bad)
        world.poll()
