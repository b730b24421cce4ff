"""Announced prompts and pins: what is brought nearer, what is kept, for how long, and at whose cost."""

from __future__ import annotations

import numpy as np
import pytest
from tests.fakes.engine_world import BLOCK, EngineWorld

from dflash2.engine.base import FinishReason, RequestHints
from dflash2.engine.hints import MAX_EXPECTED
from dflash2.errors import RequestError
from dflash2.types import IntArray, Tier

FIRST = list(range(20))


def ids(tokens: list[int]) -> IntArray:
    return np.array(tokens, np.int32)


def crowd_out(world: EngineWorld, count: int = 6) -> None:
    """Other requests take HBM."""
    for number in range(count):
        world.add([40 + number % 10] * 12 + [number], 20)
    world.run(3_000)


def hints(world: EngineWorld) -> dict[str, int]:
    return world.engine.stats()["hints"]


def test_an_announced_prompt_is_brought_nearer_and_told_where_it_was() -> None:
    world = EngineWorld((16, 60, 0))
    world.add(FIRST, 2)
    world.run(50)
    crowd_out(world)
    before = world.engine.prefetch(ids(FIRST), None, None, 60.0)
    assert (before.num_prompt_tokens, before.hbm_tokens, before.nvme_tokens) == (20, 0, 0)
    assert before.dram_tokens == 16 and before.missing_tokens == 4, "the last token is always computed"
    for _ in range(30):
        world.transfer.end_all()
        world.engine.idle()
        world.clock.advance(0.1)
    after = world.engine.prefetch(ids(FIRST), None, None, 60.0)
    assert after.hbm_tokens > 0 and after.hbm_tokens + after.dram_tokens == 16
    assert hints(world)["prefetch_hints"] == 2
    world.clock.advance(61.0)
    world.engine.idle()
    assert hints(world)["expected_prompts"] == 0 and len(world.runtime.prompts.arrivals) == 0
    world.check_all_given_back()


def test_another_tenants_blocks_are_not_found() -> None:
    world = EngineWorld((16, 60, 0))
    world.add(FIRST, 2, tenant_salt="a")
    world.run(50)
    assert world.engine.prefetch(ids(FIRST), None, "b", 1.0).missing_tokens == 20
    assert world.engine.prefetch(ids(FIRST), None, "a", 1.0).hbm_tokens == 16
    with pytest.raises(RequestError, match="no adapters"):
        world.engine.prefetch(ids(FIRST), "x", "a", 1.0)


def test_so_many_announcements_are_looked_after() -> None:
    world = EngineWorld((40, 60, 0))
    for number in range(MAX_EXPECTED + 3):
        world.add([number] * 9, 1)
    world.run(50)
    for number in range(MAX_EXPECTED + 3):
        world.engine.prefetch(ids([number] * 9), None, None, 100.0)
    assert len(world.runtime.prompts.arrivals) == MAX_EXPECTED
    world.engine.close()


def test_a_pinned_prompt_outlives_what_would_have_pushed_it_out() -> None:
    def found(pin: bool) -> int:
        world = EngineWorld((12, 12, 0), policy="lru")
        world.add(FIRST, 2, hints=RequestHints("s", 1_000.0, 0, pin=True) if pin else RequestHints("s"))
        world.run(50)
        for number in range(12):
            world.add([number + 1] * 14 + [number], 12)
            world.run(500)
        report = world.engine.prefetch(ids(FIRST), None, None, 1.0)
        world.check_answers()
        if pin:
            assert hints(world) | {"pins": 1, "pinned_blocks": 5, "pins_refused": 0} == hints(world)
            assert world.runtime.ledger.num_promised == 5
            world.clock.advance(1_001.0)
            world.engine.idle()
            assert hints(world)["pinned_prompts"] == 0
        world.check_all_given_back()
        return report.num_prompt_tokens - report.missing_tokens

    assert found(pin=False) < 16 and found(pin=True) == 16


def test_a_sessions_next_pin_takes_the_place_of_its_last() -> None:
    world = EngineWorld((30, 60, 0))
    for length, pinned in ((9, 2), (17, 4), (13, 3)):
        world.add(list(range(length)), 2, hints=RequestHints("s", 100.0, pin=True))
        world.run(50)
        assert hints(world)["pinned_blocks"] == pinned == world.runtime.ledger.num_promised
    world.add([1] * 9, 2, hints=RequestHints(None, 100.0, pin=True))
    world.run(50)
    assert hints(world)["pinned_prompts"] == 2
    world.engine.close()
    assert world.runtime.ledger.num_promised == 0


def test_pins_take_their_share_and_no_more() -> None:
    world = EngineWorld((16, 17, 0))  # 32 blocks may be promised: pins may take 8
    for number in range(4):
        world.add([number] * 12, 2, hints=RequestHints(f"s{number}", 100.0, pin=True))
        world.run(50)
    assert hints(world)["pinned_blocks"] == 6 and hints(world)["pins_refused"] == 2
    world.add_random(8)
    world.run(2_000)
    world.check_answers()
    world.clock.advance(101.0)
    world.check_all_given_back()


def test_without_a_tier_below_hbm_nothing_is_pinned() -> None:
    world = EngineWorld((16, 0, 0))
    world.add(FIRST, 2, hints=RequestHints("s", 100.0, pin=True))
    world.run(50)
    assert hints(world)["pins_refused"] == 1
    world.check_all_given_back()


def test_a_request_that_ends_early_pins_what_it_has() -> None:
    world = EngineWorld((16, 40, 0))
    name = world.add(FIRST, 20, hints=RequestHints("s", 100.0, pin=True))
    world.step()
    world.step()
    world.engine.cancel(name)
    world.step()
    assert world.reasons[name] is FinishReason.CANCELLED
    assert hints(world)["pinned_blocks"] == len(FIRST) // BLOCK
    kept = world.runtime.cache.table
    assert int((kept.ref_count > 0).sum()) == 5 and kept.num_pinned == 0 and kept.num_used(Tier.HBM) >= 5
    world.engine.close()
