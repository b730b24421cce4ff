"""Which leaves eviction on the device passes over, against plain LRU on made-up traffic."""

from __future__ import annotations

import random
from collections import OrderedDict

from dflash2.integrations.sglang.clock import TurnoverClock
from dflash2.integrations.sglang.device_heat import MOST_SPARED, DeviceHeat

POOL = 64


def hits(seed: int, *, with_heat: bool, one_shots: float) -> int:
    """Conversations that return at random, and prompts that never do, one page each, in a pool of ``POOL``."""
    rng = random.Random(seed)
    clock = TurnoverClock(POOL)
    heat = DeviceHeat(POOL, clock)
    pool: OrderedDict[str, None] = OrderedDict()
    found = 0
    for step in range(4000):
        page = f"once {step}" if rng.random() < one_shots else f"chat {rng.randrange(60)}"
        found += page in pool
        if page not in pool:
            clock.advance(1)
            if len(pool) == POOL:
                heat.begin(sparing=with_heat)
                victim = next((leaf for leaf in list(pool) if not heat.spares(leaf)), next(iter(pool)))
                del pool[victim]
        pool[page] = None
        pool.move_to_end(page)
        heat.used([page])
    return found


def test_conversations_outlive_prompts_that_never_return() -> None:
    plain = sum(hits(seed, with_heat=False, one_shots=0.4) for seed in range(3))
    heat = sum(hits(seed, with_heat=True, one_shots=0.4) for seed in range(3))
    assert heat > 1.3 * plain


def test_without_such_prompts_it_is_no_worse_than_lru() -> None:
    plain = sum(hits(seed, with_heat=False, one_shots=0.0) for seed in range(3))
    heat = sum(hits(seed, with_heat=True, one_shots=0.0) for seed in range(3))
    assert heat > 0.98 * plain


def test_leaves_used_alike_go_in_the_order_of_lru() -> None:
    clock = TurnoverClock(POOL)
    heat = DeviceHeat(POOL, clock)
    for page in range(POOL):
        clock.advance(1)
        heat.used([str(page)])
    heat.begin(sparing=True)
    assert not any(heat.spares(str(page)) for page in range(8))


def test_a_walk_spares_so_many_and_no_more_and_none_when_told_so() -> None:
    clock = TurnoverClock(POOL)
    heat = DeviceHeat(POOL, clock)
    heat.used(["cold"])
    for _ in range(20):
        heat.used([f"hot {i}" for i in range(2 * MOST_SPARED)])
    heat.begin(sparing=False)
    assert not any(heat.spares("cold") or heat.spares(f"hot {i}") for i in range(4))
    for _ in range(200):
        heat.spares("cold")
    heat.begin(sparing=True)
    spared = [heat.spares("cold") or heat.spares(f"hot {i}") for i in range(2 * MOST_SPARED)]
    assert sum(spared) <= MOST_SPARED
    assert spared[0]


def test_what_it_remembers_has_a_bound() -> None:
    heat = DeviceHeat(4, TurnoverClock(4))
    heat.used([str(i) for i in range(1000)])
    assert len(heat._uses) == 16
    heat.clear()
    assert not heat.spares("999")
