"""Cases T20 and T24: a prefetch takes what is free, is counted to its end, and never stands in anybody's way."""

from __future__ import annotations

import numpy as np
import pytest
from tests.fakes.cache_world import CacheWorld, Request

from dflash2.types import Tier, Urgency


def paused(world: CacheWorld, number: int, tier: Tier, blocks: int = 2) -> Request:
    """A request with ``blocks`` full blocks, all of them on ``tier`` only."""
    request = world.open([number] * (2 * blocks), [1, 1])
    assert request is not None and world.try_enter(request, 2 * blocks) and world.write(request, 2 * blocks)
    world.leave(request)
    world.cache.mover.copy(request.sequence.block_ids, Tier.HBM, tier, Urgency.DEMOTION, evict_source=True)
    world.transfer.end_all()
    world.poll()
    assert world.table.present[request.sequence.block_ids].tolist() == [1 << tier] * blocks
    return request


def arrive(world: CacheWorld) -> None:
    world.transfer.end_all()
    world.poll()


def outcomes(world: CacheWorld) -> tuple[int, int, int, int]:
    """(issued, used, late, wasted)"""
    counters = world.cache.counters
    return (
        counters.prefetch_issued_blocks,
        counters.prefetch_used_blocks,
        counters.prefetch_late_blocks,
        counters.prefetch_wasted_blocks,
    )


@pytest.fixture
def world() -> CacheWorld:
    return CacheWorld((10, 6, 12), 2, "heat")


@pytest.mark.parametrize("tier", [Tier.DRAM, Tier.NVME])
def test_what_arrives_before_it_is_needed_was_used(world: CacheWorld, tier: Tier) -> None:
    request = paused(world, 1, tier)
    world.prefetch([request])
    assert outcomes(world) == (2, 0, 0, 0)
    assert {job.urgency for job in world.transfer.submitted[-1:]} == {Urgency.SPECULATIVE}
    arrive(world)
    assert world.try_enter(request, 2)
    assert outcomes(world) == (2, 2, 0, 0)
    assert world.cache.counters.hbm_hit_rate == 1.0
    assert world.cache.prefetcher.num_outstanding == 0
    world.check()


def test_what_is_still_on_its_way_was_late_and_is_not_loaded_twice(world: CacheWorld) -> None:
    request = paused(world, 1, Tier.DRAM)
    world.prefetch([request])
    assert world.try_enter(request, 2)
    assert outcomes(world) == (2, 0, 2, 0)
    assert len(world.transfer.in_flight) == 1
    arrive(world)
    assert world.advance_entering(request)
    assert world.cache.counters.swap_in_blocks == 2


def test_what_nobody_waits_for_any_more_was_wasted(world: CacheWorld) -> None:
    request = paused(world, 1, Tier.DRAM)
    world.prefetch([request])
    world.close(request)
    arrive(world)
    world.prefetch([])
    assert outcomes(world) == (2, 0, 0, 2)
    assert world.cache.prefetcher.num_outstanding == 0


def test_cancelled_requests_do_not_use_up_the_window(world: CacheWorld) -> None:
    for number in range(1, 5):
        request = paused(world, number, Tier.NVME)
        world.prefetch([request])
        arrive(world)
        world.close(request)
    assert outcomes(world)[0] == 8


def test_what_was_given_up_before_use_was_wasted(world: CacheWorld) -> None:
    request = paused(world, 1, Tier.DRAM)
    world.prefetch([request])
    arrive(world)
    world.table.drop(request.sequence.block_ids, Tier.HBM)
    world.prefetch([request])
    assert outcomes(world) == (4, 0, 0, 2)


def test_no_more_than_the_window_is_on_its_way_or_unused(world: CacheWorld) -> None:
    requests = [paused(world, number, Tier.NVME) for number in (1, 2, 3)]
    for _ in range(3):
        world.prefetch(requests)
        arrive(world)
    assert outcomes(world) == (4, 0, 0, 0)
    assert world.try_enter(requests[0], 1)
    world.prefetch(requests)
    assert outcomes(world) == (6, 2, 0, 0)


def test_the_order_of_need_is_kept(world: CacheWorld) -> None:
    first, second, third = (paused(world, number, Tier.NVME) for number in (1, 2, 3))
    world.prefetch([second, third, first])
    bit = np.uint8(1 << Tier.HBM)
    arriving = [bool((world.table.arriving[one.sequence.block_ids] & bit).all()) for one in (first, second, third)]
    assert arriving == [False, True, True]


@pytest.mark.parametrize("kind", ["nothing", "resident already", "never computed"])
def test_with_nothing_to_fetch_it_ends_at_once(world: CacheWorld, kind: str) -> None:
    if kind == "resident already":
        request = world.open([1] * 4, [1])
        assert request is not None and world.try_enter(request, 4) and world.write(request, 4)
        world.leave(request)
    elif kind == "never computed":
        world.open([1] * 4, [1])
    world.prefetch(world.requests)
    assert outcomes(world) == (0, 0, 0, 0) and not world.transfer.in_flight


def test_it_evicts_nobody() -> None:
    world = CacheWorld((4, 6, 12), 2, "heat")
    request = paused(world, 1, Tier.NVME)
    other = world.open([5] * 6, [1])
    assert other is not None and world.try_enter(other, 6) and world.write(other, 6)
    world.leave(other)  # three of four slots: the last one is kept for new blocks
    before = world.table.present[other.sequence.block_ids].copy()
    world.prefetch([request, other])
    assert (world.table.present[other.sequence.block_ids] == before).all()
    # Without room in HBM it brings NVMe blocks to DRAM.
    assert {(job.src, job.dst) for job in world.transfer.submitted[-1:]} == {(Tier.NVME, Tier.DRAM)}


@pytest.mark.parametrize("expected", [False, True])
def test_in_a_full_dram_copies_that_nobody_waits_for_make_way(expected: bool) -> None:
    world = CacheWorld((4, 2, 12), 2, "heat")
    kept, waiting = paused(world, 1, Tier.NVME), paused(world, 2, Tier.NVME)
    world.cache.mover.copy(kept.sequence.block_ids, Tier.NVME, Tier.DRAM, Urgency.DEMAND)
    arrive(world)
    other = world.open([5] * 6, [1])
    assert other is not None and world.try_enter(other, 6) and world.write(other, 6)  # HBM has no slot to spare
    world.prefetch([waiting, kept] if expected else [waiting])
    arrive(world)
    assert world.table.has(kept.sequence.block_ids, Tier.NVME).all()
    assert world.table.has(kept.sequence.block_ids, Tier.DRAM).tolist() == [expected] * 2
    assert world.table.has(waiting.sequence.block_ids, Tier.DRAM).tolist() == [not expected] * 2
    world.check()


def test_a_demotion_never_fails_because_of_a_prefetch() -> None:
    """Fifty queued requests with blocks on NVMe, DRAM for three blocks, a running request that has to leave."""
    world = CacheWorld((8, 3, 120), 2, "heat")
    queued = [paused(world, number, Tier.NVME, blocks=1) for number in range(1, 51)]
    running = world.open([77] * 8, [1] * 4)
    assert running is not None and world.try_enter(running, 8) and world.write(running, 8)
    for _ in range(5):
        world.prefetch(queued)
    world.leave(running)
    begun = world.cache.room.demote(running.sequence.block_ids, Tier.HBM, world.now)
    assert len(begun) == 4
    arrive(world)
    assert not world.table.has(running.sequence.block_ids, Tier.HBM).any()
    world.check()


def test_nothing_is_loaded_twice_without_use() -> None:
    world = CacheWorld((8, 3, 120), 2, "heat")
    queued = [paused(world, number, Tier.NVME, blocks=1) for number in range(1, 51)]
    for request in list(queued):
        for turn, waiting in enumerate(queued):
            world.cache.residency.expect(waiting.sequence, world.now + turn)
        world.prefetch(queued)
        arrive(world)
        assert world.settle_enter(request, 1) and world.settle_write(request, 1)
        queued.remove(request)
        world.close(request)
        world.clock.advance(0.1)
        world.rebalance([])
        arrive(world)
    issued, used, late, wasted = outcomes(world)
    assert issued >= 40
    assert wasted / issued < 0.05
    assert used + late + wasted <= issued
    world.check()
