"""What heat is for, on the real manager: a long sequence that pauses, and traffic that is seen once."""

from __future__ import annotations

from tests.fakes.cache_world import CacheWorld, Request

from dflash2.cache.sequence import Residency
from dflash2.policy.adaptive import AdaptiveThreshold


def enter(world: CacheWorld, request: Request, growth: int) -> None:
    """Bring it in beside whoever is in; copies end at once."""
    assert request.sequence.residency is not Residency.PAUSED or world.try_enter(request, growth)
    for _ in range(100):
        if request.sequence.residency is Residency.RESIDENT or world.advance_entering(request):
            return
        world.transfer.end_all()
        world.poll()
    raise AssertionError("it did not come in")


def write(world: CacheWorld, request: Request, count: int) -> None:
    for _ in range(100):
        if world.write(request, count):
            return
        world.transfer.end_all()
        world.poll()
    raise AssertionError("it got no room")


def settle(world: CacheWorld) -> None:
    for _ in range(8):
        world.rebalance([])
        world.transfer.end_all()
        world.poll()


def pauses_among_short_traffic(policy: str) -> int:
    """Blocks swapped while half of HBM pauses and returns ten times."""
    world = CacheWorld((24, 80, 0), 2, policy)
    long = world.open([1] * 24, [1] * 2)
    assert long is not None
    enter(world, long, 24)
    write(world, long, 24)
    for turn in range(10):
        world.leave(long)
        for number in range(6):
            short = world.open([100 + 10 * turn + number] * 6, [1] * 2)
            assert short is not None
            enter(world, short, 6)
            write(world, short, 6)
            world.clock.advance(1.0)
            world.close(short)
            settle(world)
        enter(world, long, 0)
        world.clock.advance(1.0)
        settle(world)
    world.check()
    return world.cache.counters.swap_in_blocks + world.cache.counters.swap_out_blocks


def test_a_long_sequence_that_pauses_among_short_traffic_stays() -> None:
    swapped = {policy: pauses_among_short_traffic(policy) for policy in ("lru", "heat")}
    assert swapped == {"lru": 376, "heat": 180}
    assert swapped["heat"] <= swapped["lru"] / 2


def hot_load_swaps(threshold: float, *, guarded: bool) -> int:
    """Blocks swapped by four sequences that fill HBM to 95 % and take turns."""
    world = CacheWorld((40, 80, 0), 2, "heat")
    world.rebalancer.guard = AdaptiveThreshold(threshold) if guarded else None
    world.cache.policy.cold_threshold = threshold
    requests: list[Request] = []
    for number, blocks in enumerate((10, 10, 9, 9)):
        request = world.open([number] * 2 * blocks, [1] * 2)
        assert request is not None
        enter(world, request, 2 * blocks)
        write(world, request, 2 * blocks)
        world.leave(request)
        requests.append(request)
    for _ in range(400):
        for request in requests:
            enter(world, request, 0)
            world.clock.advance(0.5)
            world.leave(request)
            settle(world)
    world.check()
    return world.cache.counters.swap_in_blocks + world.cache.counters.swap_out_blocks


def test_with_the_guard_a_hot_load_hardly_swaps_at_threshold_0_99() -> None:
    """R-3.5: all that is demoted comes back. The guard sees that and leaves the threshold of the user alone."""
    at_0_8, at_0_99 = hot_load_swaps(0.8, guarded=True), hot_load_swaps(0.99, guarded=True)
    assert abs(at_0_99 - at_0_8) <= 0.05 * at_0_8
    assert hot_load_swaps(0.99, guarded=False) >= 10 * at_0_99
