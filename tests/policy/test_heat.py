"""Heat on streams of requests: what it learns, what it must not know, what it forgives."""

from __future__ import annotations

import json
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.policy.single_tier import SingleTier

from dflash2.policy.base import PlacementPolicy
from dflash2.policy.heat import HeatPolicy
from dflash2.policy.lru import LRUPolicy
from dflash2.policy.rebuild import RebuildCost
from dflash2.types import Tier

Event = tuple[float, str, str, list[int]]
"""Time, "arrive" or "finish", name, blocks."""


def chats(seed: int, count: int, *, length: float = 6.0) -> list[Event]:
    """Sessions that come back after some ten seconds, six times in the mean; each turn adds three blocks."""
    rng = random.Random(seed)
    events: list[Event] = []
    next_block = 1_000_000 * (seed + 1)
    for session in range(count):
        now, blocks, turn = rng.uniform(0.0, 600.0), [0], 0
        while turn == 0 or rng.random() > 1 / length:
            blocks = [*blocks, *range(next_block, next_block + 3)]
            next_block += 3
            name = f"{seed}-{session}-{turn}"
            events += [(now, "arrive", name, blocks), (now + 2.0, "finish", name, [])]
            now += 2.0 + rng.lognormvariate(2.3, 0.5)
            turn += 1
    return sorted(events, key=lambda event: event[0])


def scan(start: float, count: int) -> list[Event]:
    """Requests of five blocks that nobody wants again, two a second."""
    return [
        (start + 0.5 * number, "arrive", f"scan-{number}", list(range(-5 * number - 5, -5 * number)))
        for number in range(count)
    ]


def serve(cache: SingleTier, events: list[Event]) -> dict[str, int]:
    """Hits of each request."""
    hits = {}
    for now, what, name, blocks in events:
        if what == "arrive":
            hits[name] = cache.arrive(name, blocks, now)
        else:
            cache.finish(name, now, "stop")
    return hits


def heat(capacity: int) -> SingleTier:
    return SingleTier(HeatPolicy(capacity, 0.8), capacity)


def test_a_part_of_a_stream_is_served_as_within_the_whole() -> None:
    """Nothing is known ahead of time."""
    events = chats(1, 150)
    whole, part = heat(150), heat(150)
    of_whole = serve(whole, events)
    of_part = serve(part, events[:500])
    assert part.victims and len(part.victims) < len(whole.victims)
    assert part.victims == whole.victims[: len(part.victims)]
    assert all(of_whole[name] == hits for name, hits in of_part.items())


def test_the_same_stream_is_served_the_same_twice() -> None:
    events = chats(2, 60)
    one, other = heat(100), heat(100)
    assert serve(one, events) == serve(other, events)
    assert one.victims == other.victims
    np.testing.assert_array_equal(one.table.heat, other.table.heat)


def test_it_beats_lru_where_sessions_come_back() -> None:
    events = chats(3, 200)
    by_heat = sum(serve(heat(150), events).values())
    by_lru = sum(serve(SingleTier(LRUPolicy(150), 150), events).values())
    assert by_heat > 1.05 * by_lru


def test_a_scan_twice_the_size_of_the_cache_does_not_wash_the_hot_set_out() -> None:
    events = chats(4, 120)
    capacity = 400
    scanned = sorted([*events, *scan(300.0, 160)], key=lambda event: event[0])
    wanted = sum(len(blocks) for _, what, _, blocks in events if what == "arrive")

    def share(policy: PlacementPolicy, stream: list[Event]) -> float:
        hits = serve(SingleTier(policy, capacity), stream)
        return sum(count for name, count in hits.items() if not name.startswith("scan")) / wanted

    assert share(HeatPolicy(capacity, 0.8), scanned) >= share(HeatPolicy(capacity, 0.8), events) - 0.02


def test_heat_is_what_it_says() -> None:
    """Of the blocks with a heat of about a half, about a half are used within the horizon."""
    events = chats(5, 200)
    cache = heat(600)
    noted: list[tuple[float, float, int, float]] = []
    used: dict[int, list[float]] = {}
    for index, (now, what, name, blocks) in enumerate(events):
        if what != "arrive":
            cache.finish(name, now, "stop")
            continue
        for block in blocks:
            used.setdefault(block, []).append(now)
        cache.arrive(name, blocks, now)
        if index > 500 and index % 50 == 0:
            cache.policy.refresh(cache.table, now)
            horizon = cache.policy.horizon_s(now)
            noted += [(now, horizon, block, float(cache.table.heat[row])) for block, row in cache.row_of.items()]
    for low in np.arange(0.0, 1.0, 0.1):
        some = [one for one in noted if low <= one[3] < low + 0.1]
        if len(some) >= 1000:
            came = np.mean([any(now < at <= now + horizon for at in used[block]) for now, horizon, block, _ in some])
            assert abs(came - np.mean([one[3] for one in some])) < 0.1, low


def test_of_what_leaves_for_nvme_the_least_likely_is_forgotten_and_nothing_that_is_expected() -> None:
    cache = heat(4000)
    policy, table = cache.policy, cache.table
    serve(cache, sorted([*chats(4, 80), *scan(300.0, 160)], key=lambda event: event[0]))
    for step in range(10):  # judged while sessions come back, so that there is reuse to spare
        now = 5_000.0 + 2_000.0 * step
        serve(cache, [(now + at, what, f"{step}{name}", blocks) for at, what, name, blocks in chats(20 + step, 20)])
        rows = cache.rows()
        expected = rows[:5]
        table.next_use[expected] = now
        forgotten = policy.on_leave(table, rows, Tier.NVME, now + 1_500.0)
        table.next_use[expected] = np.inf
    chance = policy.heat(table, rows, now + 1_500.0)
    assert forgotten.any() and not forgotten.all() and not forgotten[:5].any()
    assert chance[forgotten].mean() < chance[~forgotten].mean()


def test_what_is_costly_to_compute_again_weighs_more_where_something_is_to_be_forgotten(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cache, judged = heat(400), []
    policy, table = cache.policy, cache.table
    assert isinstance(policy, HeatPolicy)
    serve(cache, chats(4, 40))
    rows = cache.rows()
    table.position[rows] = np.arange(len(rows)) % 7
    monkeypatch.setattr(policy._writes, "judge", lambda chances: judged.append(chances) or chances < 0)
    for cost in (RebuildCost(), RebuildCost(2.0)):
        policy._rebuild = cost
        policy.on_leave(table, rows, Tier.NVME, 5_000.0)
    alike, weighed = judged
    assert alike.any() and np.allclose(weighed, alike * cost.of(table.position[rows]))


def test_what_was_learned_survives_a_restart() -> None:
    events = chats(6, 150)
    before = heat(150)
    serve(before, events)
    state = json.loads(json.dumps(before.policy.state()))
    hits = {"fresh": 0, "taught": 0}
    for seed in (8, 9, 10):  # one stream alone is a matter of luck
        fresh, taught = heat(60), heat(60)
        taught.policy.restore(state)
        later = [(now + 10_000.0, what, "later" + name, blocks) for now, what, name, blocks in chats(seed, 40)]
        hits["taught"] += sum(serve(taught, later).values())
        hits["fresh"] += sum(serve(fresh, later).values())
    assert hits["taught"] > 1.01 * hits["fresh"]


@pytest.mark.parametrize("state", [{}, {"policy": "lru"}, {"policy": "heat", "version": -1}])
def test_a_state_of_something_else_is_ignored(state: dict[str, object]) -> None:
    policy = HeatPolicy(8, 0.8)
    policy.restore(state)
    assert policy.state()["policy"] == "heat"


@settings(max_examples=25, deadline=None)
@given(
    calls=st.lists(
        st.tuples(st.integers(0, 5), st.integers(1, 9), st.floats(0.0, 50.0), st.booleans(), st.booleans()),
        max_size=60,
    )
)
def test_whatever_comes_heat_is_a_probability_and_the_order_is_complete(
    calls: list[tuple[int, int, float, bool, bool]],
) -> None:
    cache = heat(20)
    now, running = 0.0, []
    for number, (session, length, gap, ends, known) in enumerate(calls):
        now += gap
        blocks = [100 * session + index for index in range(length)]
        name = str(number)
        cache.arrive(name, blocks, now, session=str(session) if known else None)
        running.append(name)
        if ends:
            cache.finish(running.pop(0), now + 0.1, "stop" if known else None)
        cache.policy.refresh(cache.table, now)
        rows = cache.rows()
        values = cache.table.heat[rows]
        assert np.isfinite(values).all() and (values >= 0).all() and (values <= 1).all()
        assert sorted(cache.policy.order(cache.table, rows, len(rows), now).tolist()) == rows.tolist()
        assert json.dumps(cache.policy.explain(cache.table, int(rows[0]), now))
