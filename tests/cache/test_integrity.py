"""Each thing that must hold between sequences and table is noticed when it does not."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from tests.cache.test_manager import PROMPT, run
from tests.fakes.cache_world import CacheWorld, Request

from dflash2.errors import IntegrityError
from dflash2.table.page_table import BlockState


def swap_slots(world: CacheWorld, request: Request) -> None:
    request.sequence.hbm_slots = request.sequence.hbm_slots[::-1].copy()


def lose_reference(world: CacheWorld, request: Request) -> None:
    world.table.ref_count[request.sequence.block_ids[0]] -= 1


def pin_twice(world: CacheWorld, request: Request) -> None:
    world.table.pin_count[request.sequence.block_ids[0]] += 1


def share_the_tail(world: CacheWorld, request: Request) -> None:
    world.table.state[request.sequence.block_ids[-1]] = BlockState.SEALED


def promise_too_much(world: CacheWorld, request: Request) -> None:
    request.sequence.growth_blocks += 1


@pytest.mark.parametrize(
    ("break_it", "said"),
    [
        (swap_slots, "not where it should be"),
        (lose_reference, "counts differ"),
        (pin_twice, "counts differ"),
        (share_the_tail, "is shared or has a copy"),
        (promise_too_much, "does not add up"),
    ],
)
def test_what_is_broken_is_noticed(break_it: Callable[[CacheWorld, Request], None], said: str) -> None:
    world = CacheWorld((8, 6, 10), 2, "lru")
    request = run(world, PROMPT, [7])  # its last block holds one token
    world.cache.check_integrity()
    break_it(world, request)
    with pytest.raises(IntegrityError, match=said):
        world.cache.check_integrity()
