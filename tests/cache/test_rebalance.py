"""Watermarks, cold and hot, early copies; cases T25 and T29 and R-3.2, R-3.5."""

from __future__ import annotations

import pytest
from tests.fakes.cache_world import CacheWorld, Request

from dflash2.types import Tier


def sitting(world: CacheWorld, number: int, blocks: int) -> Request:
    """A paused request whose full blocks are all in HBM."""
    request = world.open([number] * (2 * blocks), [1] * 2)
    assert request is not None and world.try_enter(request, 2 * blocks) and world.write(request, 2 * blocks)
    world.leave(request)
    return request


def in_hbm(world: CacheWorld, request: Request) -> list[bool]:
    return [bool(there) for there in world.table.has(request.sequence.block_ids, Tier.HBM)]


def rounds(world: CacheWorld, count: int) -> None:
    for _ in range(count):
        world.rebalance([])
        world.transfer.end_all()
        world.poll()


@pytest.fixture
def world() -> CacheWorld:
    """Ten HBM slots: demotion starts above 8 and stops at 5; jobs of at most 3 blocks."""
    world = CacheWorld((10, 8, 20), 2, "heat")
    world.rebalancer.guard = None
    return world


def test_below_the_high_watermark_nothing_moves(world: CacheWorld) -> None:
    sitting(world, 1, 8)
    world.clock.advance(1e5)
    rounds(world, 5)
    assert not world.transfer.submitted


def test_above_it_the_coldest_leave_down_to_the_low_one(world: CacheWorld) -> None:
    old = sitting(world, 1, 5)
    world.clock.advance(2e4)
    new = sitting(world, 2, 4)
    rounds(world, 1)
    assert len(world.transfer.submitted) == 1 and len(world.transfer.submitted[0].src_slots) == 3
    rounds(world, 9)
    assert world.table.num_used(Tier.HBM) == 5
    # The end of a sequence leaves before its head.
    assert in_hbm(world, old) == [True, False, False, False, False] and all(in_hbm(world, new))
    assert world.table.has(old.sequence.block_ids[1:], Tier.DRAM).all()
    world.check()


def test_what_is_not_cold_stays_whatever_the_watermark_says(world: CacheWorld) -> None:
    request = sitting(world, 1, 9)
    world.cache.policy.cold_threshold = 0.3
    rounds(world, 5)
    assert all(in_hbm(world, request)) and not world.transfer.submitted
    # A reservation that needs the room gets it all the same: a fully hot pool never deadlocks.
    other = world.open([2] * 8, [1])
    assert other is not None and world.settle_enter(other, 8) and world.settle_write(other, 8)
    world.check()


def test_nobody_looks_for_cold_blocks_again_before_something_has_changed(world: CacheWorld) -> None:
    request = sitting(world, 1, 9)
    world.cache.policy.cold_threshold = 0.3
    looks: list[int] = []
    is_cold = world.cache.policy.is_cold
    world.cache.policy.is_cold = lambda table, ids, now: (looks.append(len(ids)), is_cold(table, ids, now))[1]  # type: ignore[method-assign]
    rounds(world, 5)
    assert looks == [9]
    world.clock.advance(1.5)  # heat is computed again: a second look
    rounds(world, 5)
    assert len(looks) == 2
    assert world.try_enter(request, 0)
    world.leave(request)  # it may be moved now
    rounds(world, 5)
    assert len(looks) == 3


def test_the_threshold_can_be_changed_while_running(world: CacheWorld) -> None:
    sitting(world, 1, 9)
    world.cache.policy.cold_threshold = 0.1
    rounds(world, 1)
    assert not world.transfer.submitted
    world.cache.policy.cold_threshold = 0.99
    rounds(world, 1)
    assert not world.transfer.submitted  # in effect from the next refresh on
    world.clock.advance(1.0)
    rounds(world, 1)
    assert world.transfer.submitted


def test_a_block_with_a_copy_below_leaves_without_another_copy(world: CacheWorld) -> None:
    request = sitting(world, 1, 6)
    assert world.settle_enter(request, 0)
    for _ in range(2):
        world.rebalance([request])
        world.transfer.end_all()
        world.poll()
    assert world.cache.counters.swap_out_blocks == 6
    world.leave(request)
    world.clock.advance(1e4)
    sitting(world, 2, 3)
    rounds(world, 5)
    assert world.cache.counters.freed_clean_blocks == 4
    assert world.cache.counters.swap_out_blocks == 6
    assert world.table.num_used(Tier.HBM) == 5
    world.check()


def test_full_blocks_that_leave_next_are_copied_early_open_ones_not(world: CacheWorld) -> None:
    request = world.open([1] * 7, [1])
    assert request is not None and world.try_enter(request, 8) and world.write(request, 7)
    for _ in range(3):
        world.rebalance([request])
        world.transfer.end_all()
        world.poll()
    below = world.table.has(request.sequence.block_ids, Tier.DRAM)
    assert below.tolist() == [True, True, True, False]
    assert all(in_hbm(world, request))
    # Leaving then costs a copy of the tail only.
    world.leave(request)
    before = world.cache.counters.swap_out_blocks
    assert world.cache.room.free_clean(request.sequence.block_ids).tolist() == request.sequence.block_ids[3:].tolist()
    assert world.cache.counters.swap_out_blocks == before


def test_early_copies_leave_headroom_in_dram() -> None:
    world = CacheWorld((10, 5, 20), 2, "heat")
    request = world.open([1] * 16, [1])
    assert request is not None and world.try_enter(request, 16) and world.write(request, 16)
    for _ in range(5):
        world.rebalance([request])
        world.transfer.end_all()
        world.poll()
    assert world.table.num_free(Tier.DRAM) >= 1


def test_dram_drains_to_nvme_above_its_own_watermark(world: CacheWorld) -> None:
    requests = [sitting(world, number, 4) for number in (1, 2)]
    for request in requests:
        world.cache.room.demote(request.sequence.block_ids, Tier.HBM, world.now)
        world.transfer.end_all()
        world.poll()
    assert world.table.num_used(Tier.DRAM) == 8
    world.clock.advance(1e5)
    rounds(world, 5)
    assert world.table.num_used(Tier.DRAM) == 4 and world.table.num_used(Tier.NVME) == 4
    world.check()


def test_an_idle_manager_commits_what_has_ended(world: CacheWorld) -> None:
    request = sitting(world, 1, 9)
    world.clock.advance(1e5)
    world.rebalance([])
    assert world.table.busy.any()
    world.transfer.end_all()
    world.rebalance([])
    world.transfer.end_all()
    world.rebalance([])
    world.transfer.end_all()
    world.rebalance([])
    assert not world.table.busy.any() and world.cache.mover.num_in_flight == 0
    assert world.table.num_used(Tier.HBM) == 5 and in_hbm(world, request)[0]


def test_heat_that_swings_about_the_threshold_moves_a_block_once(world: CacheWorld) -> None:
    """The watermarks are the hysteresis: down to the low one, then nothing until HBM has filled up again."""
    request = sitting(world, 1, 9)
    for turn in range(200):
        world.cache.policy.effective_threshold = 0.64 if turn % 2 else 0.62  # heat after one use: 0.632
        world.clock.advance(0.001)
        rounds(world, 1)
    assert 0 < world.cache.counters.swap_out_blocks <= 4
    assert world.cache.counters.swap_in_blocks == 0
    assert in_hbm(world, request).count(True) >= 5


def test_a_fully_hot_load_is_left_alone_even_at_threshold_0_99() -> None:
    """R-3.5: two requests take turns and use all of HBM; whatever is demoted comes back and is regretted."""
    world = CacheWorld((10, 8, 20), 2, "heat")
    world.rebalancer.guard.configured = world.rebalancer.guard.effective = 0.99
    world.cache.policy.cold_threshold = 0.99
    one, two = sitting(world, 1, 5), sitting(world, 2, 4)
    for _ in range(100):
        for request in (one, two):
            assert world.settle_enter(request, 0)
            world.clock.advance(0.5)
            rounds(world, 2)
    early = world.cache.counters.swap_in_blocks
    for _ in range(100):
        for request in (one, two):
            assert world.settle_enter(request, 0)
            world.clock.advance(0.5)
            rounds(world, 2)
    assert world.cache.counters.swap_in_blocks == early


def test_the_guard_sees_blocks_that_left_without_a_copy_too() -> None:
    """A block that has a copy below already leaves for nothing, but its return costs as much as any other's."""
    world = CacheWorld((10, 8, 20), 2, "lru")
    one, two = sitting(world, 1, 5), sitting(world, 2, 4)
    before = world.rebalancer.guard.effective
    for _ in range(40):
        for request in (one, two):
            assert world.settle_enter(request, 0)
            world.clock.advance(0.5)
            rounds(world, 2)
    assert world.cache.counters.freed_clean_blocks > 32
    assert world.rebalancer.guard.effective < before


def test_heat_is_refreshed_at_its_interval_only(world: CacheWorld) -> None:
    request = sitting(world, 1, 3)
    ids = request.sequence.block_ids
    world.rebalance([])
    first = world.table.heat[ids].copy()
    assert first.any()
    world.clock.advance(0.9)
    world.rebalance([])
    assert (world.table.heat[ids] == first).all()
    world.clock.advance(0.2)
    world.rebalance([])
    assert (world.table.heat[ids] != first).all()


def test_slots_promised_to_running_requests_are_not_spare() -> None:
    """A prefetch into them would be thrown out again before the end of the turn."""
    world = CacheWorld((10, 8, 0), 4, "heat")
    assert world.rebalancer.spare_hbm_slots() == 8  # the high watermark keeps two of ten free
    request = world.open([1] * 4, [2] * 24)
    assert request is not None
    world.settle_enter(request, 28)
    assert world.cache.residency.num_promised == 7
    assert world.rebalancer.spare_hbm_slots() == 3
