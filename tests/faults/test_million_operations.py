"""A million random operations with random faults on a full cache: nothing wrong, nothing leaked, no worse at the end.

Time is simulated. A tenth of it runs in every run of the tests, the whole with DFLASH2_TEST_SCALE=10.
"""

from __future__ import annotations

import gc
import random
from collections import Counter
from collections.abc import Callable

import numpy as np
import psutil
import pytest
from tests.fakes.cache_world import ROOTS, CacheWorld, Request

from dflash2.cache.disk_upkeep import DiskUpkeep
from dflash2.types import Tier

OPERATIONS = 100_000
CHECK_EVERY = 40
"""Operations between two complete checks of every account and every byte."""
SLOTS = (12, 10, 60)
CONVERSATIONS = 40
FAULTY, ROTTEN_ON_NVME = 0.05, 0.0005
"""Share of copies in which something fails; share in which a source on NVMe is bad at scale 1. Its slot is then retired
and NVMe smaller: however long the run, as many are, or fewer hits would be right."""


class Driver:
    """Picks operations at random; conversations come back, popular ones more often, so there is something to find."""

    def __init__(self, seed: int, rotten: float) -> None:
        self.rotten = rotten
        self.rng = random.Random(seed)
        self.world = CacheWorld(SLOTS, 2, "heat")
        self.disk = DiskUpkeep(self.world.cache, None, self.world.ledger)
        texts = random.Random(1)
        self.texts = [[texts.randint(1, 9) for _ in range(texts.randint(4, 18))] for _ in range(CONVERSATIONS)]
        self.popularity = [1 / (1 + rank) for rank in range(CONVERSATIONS)]
        self.done: Counter[str] = Counter()
        often = {"open": 8, "enter": 10, "advance": 8, "write": 14, "leave": 4, "end": 14, "settle": 3, "close": 2}
        seldom = {"rebalance": 4, "prefetch": 3, "join": 2, "wait": 3, "crash": 1, "fork": 1, "recover": 1, "expect": 1}
        self.weights: dict[str, float] = {**often, **seldom, "flush": 0.002, "press": 0.05}

    def run(self, count: int) -> None:
        names, weights = list(self.weights), list(self.weights.values())
        for index in range(count):
            name = self.rng.choices(names, weights)[0]
            if name in ("open", "end", "rebalance", "wait", "flush", "press") or self.world.requests:
                getattr(self, name)()
                self.done[name] += 1
            self.disk.run()
            if index % CHECK_EVERY == 0:
                self.world.check()
        self.world.transfer.submitted.clear()

    @property
    def request(self) -> Request:
        return self.rng.choice(self.world.requests)

    def open(self) -> None:
        text = self.rng.choices(self.texts, self.popularity)[0]
        cut = self.rng.randint(2, len(text))
        self.world.open(text[:cut], text[cut:] or [1], self.rng.choice([*ROOTS, ROOTS[0], ROOTS[0]]))

    def enter(self) -> None:
        self.world.try_enter(self.request, self.rng.randint(0, 6))

    def advance(self) -> None:
        for request in self.world.requests:
            self.world.advance_entering(request)

    def write(self) -> None:
        request = self.request
        self.world.write(request, self.rng.randint(1, 6))
        if not self.world.left(request):
            self.world.close(request)

    def crash(self) -> None:
        self.world.write(self.request, self.rng.randint(1, 6), crash=True)

    def leave(self) -> None:
        self.world.leave(self.request)

    def close(self) -> None:
        self.world.close(self.request)

    def settle(self) -> None:
        request = self.request
        if self.world.settle_enter(request, self.rng.randint(0, 6)):
            self.world.settle_write(request, self.rng.randint(1, 4))

    def rebalance(self) -> None:
        self.world.rebalance(self.world.requests[::2])

    def prefetch(self) -> None:
        self.world.prefetch(self.world.requests[::-1])

    def join(self) -> None:
        self.world.join(self.request)

    def fork(self) -> None:
        self.world.fork(self.request, [self.rng.randint(1, 2)])

    def recover(self) -> None:
        self.world.recover(self.request, give_up_loads=self.rng.random() < 0.3)

    def expect(self) -> None:
        self.world.cache.residency.expect(self.request.sequence, self.world.now + self.rng.random() * 30)

    def wait(self) -> None:
        self.world.clock.advance(self.rng.random() * 2)

    def flush(self) -> None:
        self.world.cache.forget_all()

    def press(self) -> None:
        self.world.transfer.is_pressed = self.rng.random() < 0.2

    def end(self) -> None:
        """A copy ends: whole, or some of its blocks do not arrive, or their source turns out to be bad."""
        tickets = self.world.transfer.in_flight
        if not tickets:
            return
        ticket = self.rng.choice(tickets)
        job = self.world.transfer.flights[ticket].job
        ok = [True] * len(job.src_slots)
        bad = [False] * len(job.src_slots)
        if self.rng.random() < FAULTY:
            at = self.rng.randrange(len(ok))
            ok[at] = False
            bad[at] = job.src is Tier.DRAM and self.rng.random() < 0.5
        if job.src is Tier.NVME and self.rng.random() < self.rotten:
            ok[0], bad[0] = False, True
        self.done["failed"] += not all(ok)
        self.world.transfer.end(ticket, ok, bad)
        self.world.poll()


def hit_rate_of(driver: Driver, run: Callable[[], None]) -> float:
    """Share of the looked-up tokens that were found meanwhile."""
    counters = driver.world.cache.counters
    before = sum(counters.hit_tokens.values()), counters.looked_up_tokens
    run()
    return (sum(counters.hit_tokens.values()) - before[0]) / (counters.looked_up_tokens - before[1])


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_a_million_operations(test_scale: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dflash2.policy.sessions.MAX_SESSIONS", 64)  # or the bound would not be reached
    driver = Driver(seed=5, rotten=ROTTEN_ON_NVME / test_scale)
    tenth = OPERATIONS * test_scale // 10
    rates = [hit_rate_of(driver, lambda: driver.run(tenth)) for _ in range(2)]
    objects, memory = num_objects(), psutil.Process().memory_info().rss
    rates += [hit_rate_of(driver, lambda: driver.run(tenth)) for _ in range(8)]
    more_objects, more_memory = num_objects() - objects, psutil.Process().memory_info().rss - memory

    counters = driver.world.cache.counters
    assert driver.done["failed"] > tenth / 50, "too few faults to prove anything"
    assert counters.lost_blocks and counters.recomputed_tokens and counters.swap_in_blocks > tenth / 10
    assert counters.demoted_to_nvme_blocks and counters.loaded_from_nvme_blocks and counters.prefetch_used_blocks
    assert driver.world.table.tiers[Tier.NVME].num_retired < SLOTS[2] // 2
    assert np.mean(rates[-3:]) >= np.mean(rates[:3]) - 0.02, f"hit rates by tenth: {np.round(rates, 3).tolist()}"
    assert more_objects < 1_000, f"{more_objects} objects were left behind"
    assert more_memory < 16 * 2**20, f"memory grew by {more_memory} bytes"
    driver.world.check_all_given_back()


def num_objects() -> int:
    """Objects that can hold others, alive."""
    gc.collect()
    return len(gc.get_objects())
