"""What waits is expected, by key, and no longer once it is gone."""

from __future__ import annotations

import numpy as np
from tests.fakes.cache_world import ROOTS, CacheWorld, ints

from dflash2.cache.arrivals import Arrivals
from dflash2.table.keys import chain


def world_with(prompt: list[int]) -> CacheWorld:
    """A prompt that was computed and whose request has ended."""
    world = CacheWorld((8, 8, 8), 4, "heat")
    request = world.open(prompt, [1])
    assert request is not None
    world.settle_enter(request, len(prompt))
    assert world.settle_write(request, len(prompt))
    world.close(request)
    return world


def test_cached_blocks_of_a_waiting_request_are_expected_until_it_is_forgotten() -> None:
    prompt = list(range(12))
    world = world_with(prompt)
    arrivals = Arrivals(world.table, world.cache.index)
    keys = chain(ROOTS[0], ints([*prompt, 5, 5, 5, 5]), 4)
    assert arrivals.note("a", keys, 7.0) == 3
    ids = arrivals.upcoming()
    assert len(ids) == 3 and (world.table.next_use[ids] == 7.0).all()
    assert arrivals.note("b", keys[:2], 8.0) == 2
    assert arrivals.upcoming().tolist() == ids.tolist()  # each block once
    arrivals.forget("a")
    arrivals.forget("a")
    assert arrivals.upcoming().tolist() == ids[:2].tolist()
    arrivals.forget("b")
    assert len(arrivals) == 0 and np.isinf(world.table.next_use[ids]).all()


def test_what_is_forgotten_meanwhile_is_not_expected_under_its_old_id() -> None:
    prompt = list(range(12))
    world = world_with(prompt)
    arrivals = Arrivals(world.table, world.cache.index)
    arrivals.note("a", chain(ROOTS[0], ints(prompt), 4), 7.0)
    world.cache.forget_all()
    assert len(arrivals.upcoming()) == 0
    arrivals.forget("a")


def test_a_prompt_that_is_not_cached_is_not_noted() -> None:
    world = world_with([1, 2, 3, 4])
    arrivals = Arrivals(world.table, world.cache.index)
    assert arrivals.note("a", chain(ROOTS[0], ints([9] * 8), 4), 0.0) == 0
    assert len(arrivals) == 0 and len(arrivals.upcoming()) == 0
