"""Single situations, readable one by one; the state machine looks for the others."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import pytest
from tests.fakes.cache_world import ROOTS, CacheWorld, Request, ints
from tests.fakes.transfer import POISON

from dflash2.cache.sequence import Residency
from dflash2.errors import IntegrityError
from dflash2.table.page_table import BlockState
from dflash2.types import Tier, Urgency

PROMPT = [3, 1, 4, 1, 5, 9]


def run(world: CacheWorld, prompt: list[int], script: list[int]) -> Request:
    """A request that has written all it has to say, resident."""
    request = world.open(prompt, script)
    assert request is not None
    assert world.try_enter(request, world.left(request)) and world.settle_enter(request, 0)
    assert world.settle_write(request, world.left(request))
    return request


def cached(world: CacheWorld, prompt: list[int]) -> int:
    """Tokens of the prompt that a lookup finds now."""
    return len(world.cache.peek(ROOTS[0], ints([*prompt, 0]))) * world.block_size


def push_down(world: CacheWorld, request: Request, tier: Tier) -> None:
    """Move all blocks of a paused request from HBM to ``tier``."""
    world.cache.mover.copy(request.sequence.block_ids, Tier.HBM, tier, Urgency.DEMOTION, evict_source=True)
    world.transfer.end_all()
    world.poll()


@pytest.fixture
def world() -> CacheWorld:
    return CacheWorld((8, 6, 10), 2, "lru")


# -- lookup ----------------------------------------------------------------------------------------------------------


def test_a_prompt_is_found_up_to_its_last_full_block_but_never_whole(world: CacheWorld) -> None:
    world.close(run(world, PROMPT, [7, 7]))
    assert cached(world, PROMPT) == 6
    again = world.open(PROMPT, [1])
    assert again is not None
    # One token has to be left to compute: without it there are no logits.
    assert again.sequence.num_tokens == again.sequence.num_cached_tokens == 4
    assert world.cache.counters.hit_tokens[Tier.HBM] == 4


def test_tenants_share_nothing(world: CacheWorld) -> None:
    world.close(run(world, PROMPT, [7]))
    other = world.open(PROMPT, [7], ROOTS[1])
    assert other is not None and other.sequence.num_cached_tokens == 0


def test_hits_are_counted_on_the_tier_where_they_were(world: CacheWorld) -> None:
    request = run(world, PROMPT, [7])
    world.leave(request)
    push_down(world, request, Tier.DRAM)
    world.close(request)
    world.open(PROMPT, [8])
    assert world.cache.counters.hit_tokens == {Tier.HBM: 0, Tier.DRAM: 4, Tier.NVME: 0}
    assert world.cache.counters.looked_up_tokens == 12


def test_peek_has_no_effect(world: CacheWorld) -> None:
    world.close(run(world, PROMPT, [7]))
    before = dict(world.cache.counters.flat())
    assert cached(world, PROMPT) == 6
    assert dict(world.cache.counters.flat()) == before
    world.check()


def test_nothing_is_published_before_it_is_full(world: CacheWorld) -> None:
    request = run(world, [1, 2, 3], [])
    assert [int(world.table.state[i]) for i in request.sequence.block_ids] == [BlockState.PUBLISHED, BlockState.OPEN]
    assert cached(world, [1, 2, 3, 0]) == 2


# -- flush (T14) -----------------------------------------------------------------------------------------------------


def test_after_a_flush_every_lookup_misses_on_all_tiers(world: CacheWorld) -> None:
    for prompt, tier in ((PROMPT, Tier.DRAM), ([2, 2, 2, 2], Tier.NVME), ([4, 4, 4, 4], None)):
        request = run(world, prompt, [7])
        world.leave(request)
        if tier is not None:
            push_down(world, request, tier)
        world.close(request)
    assert [cached(world, prompt) for prompt in (PROMPT, [2, 2, 2, 2], [4, 4, 4, 4])] == [6, 4, 4]
    world.cache.forget_all()
    assert [cached(world, prompt) for prompt in (PROMPT, [2, 2, 2, 2], [4, 4, 4, 4])] == [0, 0, 0]
    assert all(world.table.num_used(tier) == 0 for tier in Tier)
    world.check()


def test_a_flush_leaves_open_requests_alone(world: CacheWorld) -> None:
    request = run(world, PROMPT, [7])
    world.cache.forget_all()
    world.check()
    assert world.open(PROMPT, [1]).sequence.num_cached_tokens == 0
    world.leave(request)
    assert world.settle_enter(request, 0)
    world.check()


# -- failures (T3, T4) -----------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("short_bursts")
def test_a_failed_demotion_leaves_the_source_and_rests_the_tier(world: CacheWorld) -> None:
    request = run(world, PROMPT, [7, 7])
    world.leave(request)
    world.cache.mover.copy(request.sequence.block_ids, Tier.HBM, Tier.NVME, Urgency.DEMOTION, evict_source=True)
    first, second = world.transfer.in_flight
    world.transfer.end(first, ok=[True, False, True])
    world.transfer.end(second)
    world.poll()
    there = world.table.has(request.sequence.block_ids, Tier.NVME)
    assert there.tolist() == [True, False, True, True]
    assert world.table.has(request.sequence.block_ids, Tier.HBM).tolist() == [False, True, False, False]
    assert world.cache.counters.failed_copies == 1 and world.cache.counters.lost_blocks == 0
    assert not world.cache.mover.accepts(Tier.NVME, world.now)
    assert world.cache.mover.accepts(Tier.DRAM, world.now)
    world.clock.advance(5.0)
    assert world.cache.mover.accepts(Tier.NVME, world.now)
    assert world.settle_enter(request, 0)
    world.check()


@pytest.mark.usefixtures("short_bursts")
def test_an_unreadable_block_is_a_miss_at_once_and_the_second_lookup_too(world: CacheWorld) -> None:
    request = run(world, PROMPT, [7, 7])
    world.leave(request)
    push_down(world, request, Tier.NVME)
    assert world.try_enter(request, 0)
    first, second = world.transfer.in_flight
    world.transfer.end(first, ok=[True, False, True], bad_source=[False, True, False])
    world.transfer.end(second)
    world.poll()
    assert world.cache.residency.first_lost(request.sequence) == 1
    assert world.cache.counters.lost_blocks == 1
    assert cached(world, PROMPT) == cached(world, PROMPT) == 2
    # The slot is not used again, and nobody tries to read it a second time.
    assert world.table.tiers[Tier.NVME].num_retired == 1
    assert not world.advance_entering(request)
    assert not world.transfer.in_flight
    world.recover(request, give_up_loads=False)
    assert request.sequence.residency is Residency.PAUSED and request.sequence.num_tokens == 2
    world.check()
    assert world.try_enter(request, 6) and world.settle_enter(request, 0) and world.settle_write(request, 6)
    world.check()
    assert cached(world, PROMPT) == 6


def test_a_load_that_fails_for_want_of_a_destination_is_tried_again(world: CacheWorld) -> None:
    request = run(world, PROMPT, [7, 7])
    world.leave(request)
    push_down(world, request, Tier.DRAM)
    assert world.try_enter(request, 0)
    for ticket in world.transfer.in_flight:
        world.transfer.end(ticket, ok=False)
    world.poll()
    assert world.cache.residency.first_lost(request.sequence) is None
    assert world.settle_enter(request, 0)
    world.check()


def test_one_lost_head_makes_all_its_followers_unfindable(world: CacheWorld) -> None:
    request = run(world, PROMPT, [7, 7])
    world.leave(request)
    push_down(world, request, Tier.NVME)
    world.close(request)
    twin = world.open([*PROMPT, 7], [8])
    assert twin is not None and world.try_enter(twin, 1)
    world.transfer.end(world.transfer.in_flight[0], ok=[False, True, True], bad_source=[True, False, False])
    world.poll()
    assert cached(world, PROMPT) == 0
    world.check()


# -- pins, full tiers (T16) ------------------------------------------------------------------------------------------


def test_with_everything_pinned_making_room_says_no_and_moves_nothing(world: CacheWorld) -> None:
    request = run(world, [1] * 8, [2] * 8)
    assert world.table.num_free(Tier.HBM) == 0
    assert not world.cache.room.make(Tier.HBM, 1, world.now)
    assert not world.transfer.in_flight
    assert world.table.has(request.sequence.block_ids, Tier.HBM).all()
    assert not world.try_enter(world.open([5, 5], [5]), 1)
    world.check()


def test_a_block_being_read_is_not_chosen_while_its_tier_is_full() -> None:
    world = CacheWorld((8, 3, 0), 2, "lru", headroom=0)
    request = run(world, [1, 2, 3, 4, 5, 6], [])
    world.leave(request)
    push_down(world, request, Tier.DRAM)
    assert world.try_enter(request, 0)  # three DRAM slots are being read
    other = run_unfinished(world, [7, 8, 9, 7], [8, 9])
    world.leave(other)
    world.cache.room.demote(other.sequence.block_ids, Tier.HBM, world.now)
    assert len(world.transfer.in_flight) == 1
    assert not world.cache.room.make(Tier.DRAM, 1, world.now)
    world.check()
    world.transfer.end_all()
    world.poll()
    world.check()
    assert world.settle_enter(request, 0)


def run_unfinished(world: CacheWorld, prompt: list[int], script: list[int]) -> Request:
    """As ``run``, without ending the copies of others."""
    request = world.open(prompt, script)
    assert request is not None and world.try_enter(request, world.left(request))
    assert world.advance_entering(request) or request.sequence.residency is Residency.RESIDENT
    assert world.write(request, world.left(request))
    return request


def test_growth_that_was_promised_is_not_given_to_somebody_else(world: CacheWorld) -> None:
    one = world.open([1, 1], [1] * 8)
    two = world.open([2, 2], [2] * 8)
    assert one is not None and two is not None
    assert world.try_enter(one, 10)  # 5 of 8 blocks
    assert not world.try_enter(two, 10)
    assert world.try_enter(two, 6)
    assert not world.cache.residency.try_extend(two.sequence, 8)
    world.leave(one)
    assert world.cache.residency.try_extend(two.sequence, 8)
    world.check()


def test_only_paused_sequences_are_cut_and_only_resident_ones_grow(world: CacheWorld) -> None:
    request = run(world, PROMPT, [7])
    with pytest.raises(IntegrityError):
        world.cache.truncate(request.sequence, 1)
    world.leave(request)
    with pytest.raises(IntegrityError):
        world.cache.residency.try_grow(request.sequence, 1, world.now)


def test_a_load_does_not_wait_for_a_demotion_of_the_same_block(world: CacheWorld) -> None:
    request = run(world, [1, 2, 3, 4], [])
    world.leave(request)
    push_down(world, request, Tier.DRAM)
    ids = request.sequence.block_ids
    world.cache.mover.copy(ids, Tier.DRAM, Tier.NVME, Urgency.DEMOTION, evict_source=True)
    (demotion,) = world.transfer.in_flight
    assert world.try_enter(request, 0)
    (load,) = set(world.transfer.in_flight) - {demotion}
    world.transfer.end(demotion)
    world.poll()
    # The slots that the load reads are not given to anybody while it reads them.
    assert world.table.has(ids, Tier.DRAM).all()
    world.check()
    world.transfer.end(load)
    world.poll()
    assert world.advance_entering(request)
    world.check()


def test_a_slot_that_is_bad_is_kept_while_another_copy_still_reads_it(world: CacheWorld) -> None:
    request = run(world, [1, 2, 3, 4], [])
    world.leave(request)
    push_down(world, request, Tier.DRAM)
    ids = request.sequence.block_ids
    world.cache.mover.copy(ids, Tier.DRAM, Tier.NVME, Urgency.DEMOTION, evict_source=True)
    (demotion,) = world.transfer.in_flight
    assert world.try_enter(request, 0)
    (load,) = set(world.transfer.in_flight) - {demotion}
    world.transfer.end(load, ok=False, bad_source=True)
    world.poll()
    assert world.table.num_used(Tier.DRAM) == 2 and world.cache.counters.lost_blocks == 0
    world.transfer.end(demotion)
    world.poll()
    assert world.table.num_used(Tier.DRAM) == 0 and world.cache.counters.lost_blocks == 2
    world.recover(request, give_up_loads=False)
    world.check()
    assert world.settle_enter(request, 4) and world.settle_write(request, 4)
    world.check()


# -- mutable tails ---------------------------------------------------------------------------------------------------


def test_a_tail_written_while_it_is_copied_down_keeps_no_stale_copy(world: CacheWorld) -> None:
    request = world.open([1, 2, 3], [4])
    assert request is not None and world.try_enter(request, 4) and world.write(request, 3)
    world.leave(request)
    tail = request.sequence.block_ids[-1:]
    world.cache.mover.copy(tail, Tier.HBM, Tier.DRAM, Urgency.DEMOTION, evict_source=True)
    assert world.try_enter(request, 1) and world.write(request, 1)
    world.transfer.end_all()
    world.poll()
    assert world.table.has(tail, Tier.HBM).all() and not world.table.has(tail, Tier.DRAM).any()
    world.check()


def test_a_copy_of_the_tail_below_goes_when_the_tail_is_written(world: CacheWorld) -> None:
    request = world.open([1, 2, 3], [4])
    assert request is not None and world.try_enter(request, 4) and world.write(request, 3)
    world.leave(request)
    push_down(world, request, Tier.DRAM)
    assert world.settle_enter(request, 1)
    tail = request.sequence.block_ids[-1:]
    assert not world.table.has(tail, Tier.DRAM).any()
    # A full block keeps its copy: demoting it again costs nothing.
    assert world.table.has(request.sequence.block_ids[:1], Tier.DRAM).all()
    assert world.write(request, 1)
    world.check()


def test_twins_write_their_own_tails(world: CacheWorld) -> None:
    request = world.open([1, 2, 3], [4, 4])
    assert request is not None and world.try_enter(request, 5) and world.write(request, 3)
    twin = world.fork(request, [5, 5])
    assert twin is not None
    assert world.try_enter(twin, 2)
    assert world.write(twin, 2) and world.write(request, 2)
    world.check()
    assert request.sequence.block_ids[0] == twin.sequence.block_ids[0]
    assert request.sequence.block_ids[1] != twin.sequence.block_ids[1]


def test_twins_of_a_failed_step_write_their_own_tails(world: CacheWorld) -> None:
    request = world.open([1, 2, 3], [4, 4])
    assert request is not None and world.try_enter(request, 5) and world.write(request, 3)
    assert world.write(request, 2, crash=True)  # a third block, still empty
    twin = world.fork(request, [5, 5])
    assert twin is not None and len(twin.sequence.block_ids) == 2
    assert world.try_enter(twin, 2)
    assert world.write(request, 2)  # its tail is shared, although it is not its last block
    assert world.write(twin, 2)
    world.check()


# -- forgetting ------------------------------------------------------------------------------------------------------


def test_a_step_within_the_same_blocks_does_not_look_at_the_table(world: CacheWorld) -> None:
    """128 sequences a step leave no time for it. Leaving and forking end that right."""
    request = world.open([1] * 3, [2] * 9)
    assert request is not None and world.try_enter(request, 5)
    assert world.write(request, 3)
    sequence = request.sequence
    tail = sequence.block_ids[-1:]
    generation = int(world.table.generation[tail][0])
    assert sequence.writable_tokens == 4 and world.write(request, 1)
    assert int(world.table.generation[tail][0]) == generation
    assert world.write(request, 1) and sequence.writable_tokens == 6
    assert world.fork(request, [3]) is not None and sequence.writable_tokens == 0
    assert world.write(request, 1) and sequence.writable_tokens == 6
    world.leave(request)
    assert sequence.writable_tokens == 0
    world.check()


@pytest.mark.parametrize("policy", ["heat", "lru"])
def test_a_long_cached_chain_gives_way_from_its_end(policy: str) -> None:
    """Its head was allocated first and looks coldest; it must go last, and something must go."""
    world = CacheWorld((8, 0, 0), 2, policy)
    request = world.open([1] * 8, [2] * 8)
    assert request is not None and world.try_enter(request, 16)
    for _ in range(8):
        world.clock.advance(1.0)
        assert world.write(request, 2)
    world.close(request)
    assert cached(world, request.script) == 16
    other = run(world, [5, 5], [6])
    assert cached(world, request.script) == 12
    assert world.cache.counters.dropped_blocks == 2
    world.close(other)
    world.check()


def test_a_cached_block_whose_follower_is_held_gives_way_if_it_must() -> None:
    world = CacheWorld((4, 0, 0), 2, "lru")
    world.ledger.shrink(5)
    one, two = world.open([1, 1], []), world.open([1, 1], [2] * 6)
    assert one is not None and two is not None
    for request in (one, two):  # both compute the same block; only the first one's is published
        assert world.try_enter(request, 2) and world.write(request, 2)
    assert world.cache.residency.try_extend(two.sequence, 4) and world.write(two, 4)
    world.close(one)
    assert world.table.num_free(Tier.HBM) == 0 and len(two.sequence.block_ids) == 3
    assert world.settle_write(two, 2)
    world.check()
    world.check_all_given_back()


def test_a_copy_on_nvme_is_not_given_up_for_an_older_block_that_nobody_holds() -> None:
    """It would have to be written again."""
    world = CacheWorld((8, 6, 4), 2, "lru")
    for prompt in ([1, 1, 1, 1], [2, 2, 2, 2]):
        request = run(world, prompt, [7])
        world.leave(request)
        push_down(world, request, Tier.NVME)
        world.close(request)
        world.clock.advance(1.0)
    newer = np.array(world.cache.peek(ROOTS[0], ints([2, 2, 2, 2, 0])), np.int32)
    world.cache.mover.copy(newer, Tier.NVME, Tier.DRAM, Urgency.DEMAND)
    world.transfer.end_all()
    world.poll()
    assert world.table.num_free(Tier.NVME) == 0
    assert world.cache.room.make(Tier.NVME, 2, world.now)
    assert world.table.has(newer, Tier.NVME).all() and world.table.has(newer, Tier.DRAM).all()
    assert cached(world, [1, 1, 1, 1]) == 0
    assert world.cache.room.make(Tier.NVME, 4, world.now)
    assert cached(world, [2, 2, 2, 2]) == 4  # in DRAM
    world.check()


def test_a_lost_block_does_not_keep_new_ones_from_a_row() -> None:
    world = CacheWorld((4, 2, 0), 2, "lru")
    lost = run(world, [1, 1], [])
    world.leave(lost)
    push_down(world, lost, Tier.DRAM)
    assert world.try_enter(lost, 0)
    world.transfer.end(world.transfer.in_flight[0], ok=False, bad_source=True)
    world.poll()
    world.leave(lost)
    for prompt in ([2, 2], [3, 3]):
        request = run(world, prompt, [])
        world.leave(request)
        push_down(world, request, Tier.DRAM)
        world.close(request)
    world.close(run(world, [4, 4], []))
    assert world.table.num_free_rows == 2 and world.table.num_free(Tier.HBM) == 3
    run(world, [5, 5, 5, 5, 5], [])
    world.check()


# -- after the end ---------------------------------------------------------------------------------------------------


def test_close_is_idempotent(world: CacheWorld) -> None:
    request = run(world, PROMPT, [])
    world.cache.close(request.sequence, world.now)
    world.cache.close(request.sequence, world.now)
    world.requests.remove(request)
    world.check()


def test_blocks_of_an_ended_request_are_not_expected_any_more() -> None:
    world = CacheWorld((8, 6, 10), 2, "heat")
    request = run(world, PROMPT, [])
    world.leave(request)
    world.cache.residency.expect(request.sequence, world.now + 5)
    ids = request.sequence.block_ids.copy()
    world.close(request)
    assert np.isinf(world.table.next_use[ids]).all()
    world.clock.advance(3_000.0)
    assert world.cache.policy.is_cold(world.table, ids, world.now).all()


def test_a_turn_counts_as_use_until_its_end(world: CacheWorld) -> None:
    request = run(world, PROMPT, [])
    world.clock.advance(100.0)
    world.leave(request)
    assert (world.table.last_use[request.sequence.block_ids] == world.now).all()


# -- abort in every state (T18) --------------------------------------------------------------------------------------


def _reserved(world: CacheWorld) -> Request:
    return world.open(PROMPT, [7, 7])


def _prefetching(world: CacheWorld) -> Request:
    world.close(run(world, PROMPT, []))
    request = world.open(PROMPT, [7, 7])
    assert request is not None
    push_down(world, request, Tier.DRAM)
    world.prefetch([request])
    assert world.transfer.in_flight
    return request


def _entering(world: CacheWorld) -> Request:
    request = _prefetching(world)
    assert world.try_enter(request, 2) and request.sequence.residency is Residency.ENTERING
    return request


def _resident(world: CacheWorld) -> Request:
    return run(world, PROMPT, [7, 7])


def _demoting(world: CacheWorld) -> Request:
    request = _resident(world)
    world.leave(request)
    world.cache.mover.copy(request.sequence.block_ids, Tier.HBM, Tier.NVME, Urgency.DEMOTION, evict_source=True)
    return request


@pytest.mark.parametrize("state", [_reserved, _prefetching, _entering, _resident, _demoting])
@pytest.mark.parametrize("fails", [False, True])
def test_an_abort_in_any_state_gives_everything_back(
    world: CacheWorld, state: Callable[[CacheWorld], Request], fails: bool
) -> None:
    world.close(state(world))
    world.check()
    for ticket in world.transfer.in_flight:
        world.transfer.end(ticket, ok=not fails)
    world.poll()
    world.check_all_given_back()


@pytest.mark.long
def test_random_aborts_leave_no_trace(test_scale: int) -> None:
    """1,000 requests aborted wherever they are; 10,000 in the long run."""
    rng = random.Random(18)
    world = CacheWorld((8, 6, 10), 2, "heat")
    for number in range(1_000 * test_scale):
        request = world.open([rng.randint(1, 3) for _ in range(rng.randint(2, 7))], [rng.randint(1, 3)] * 4)
        if request is not None and world.try_enter(request, rng.randint(0, 5)):
            world.advance_entering(request)
            world.write(request, rng.randint(1, 9))
            if rng.random() < 0.5:
                world.leave(request)
        world.clock.advance(rng.random())
        world.rebalance(world.requests)
        world.prefetch(world.requests)
        for ticket in world.transfer.in_flight:
            if rng.random() < 0.5:
                world.transfer.end(ticket, ok=rng.random() < 0.9)
        while world.requests and (rng.random() < 0.4 or len(world.requests) > 4):
            world.close(rng.choice(world.requests))
        if number % 10 == 0:
            world.check()
    world.check_all_given_back()


def test_a_poisoned_slot_would_be_noticed(world: CacheWorld) -> None:
    """The account itself: what these tests compare is really compared."""
    request = run(world, PROMPT, [])
    world.memory[Tier.HBM][request.sequence.hbm_slots[0], 0] = POISON
    with pytest.raises(AssertionError, match="wrong"):
        world.check()


# -- prefixes that others publish meanwhile --------------------------------------------------------------------------


def test_a_prefix_published_since_the_lookup_is_taken_over(world: CacheWorld) -> None:
    late = world.open(PROMPT, [9])
    assert late is not None
    world.close(run(world, PROMPT, [7]))
    world.join(late)
    assert late.sequence.num_tokens == late.sequence.num_cached_tokens == 6
    assert world.cache.counters.joined_tokens == 6
    world.check()
    assert world.settle_enter(late, 1) and world.settle_write(late, 1)
    world.check()


def test_a_resident_sequence_waits_for_what_it_takes_over_from_below(world: CacheWorld) -> None:
    late = world.open(PROMPT, [9])
    assert late is not None and world.settle_enter(late, 7)
    other = world.open(PROMPT, [7])
    assert other is not None and world.try_enter(other, 6) and world.write(other, 6)
    world.leave(other)
    push_down(world, other, Tier.NVME)
    world.close(other)
    world.join(late)
    assert late.sequence.residency is Residency.ENTERING and late.sequence.num_tokens == 6
    assert late.sequence.growth_blocks == 1
    world.check()
    assert world.settle_enter(late, 1) and world.settle_write(late, 1)
    world.check()


def test_a_block_that_is_taken_over_is_not_forgotten_to_make_room_for_itself() -> None:
    world = CacheWorld((4, 1, 0), 2, "lru", headroom=0)
    late = world.open([1, 1, 2], [])
    cold = run(world, [1, 1], [])
    world.leave(cold)
    push_down(world, cold, Tier.DRAM)
    world.close(cold)
    world.close(run(world, [5, 5], []))
    held = run(world, [3] * 6, [])
    world.leave(held)
    assert world.table.num_free(Tier.HBM) == world.table.num_free(Tier.DRAM) == 0
    assert late is not None and world.try_enter(late, 3)
    world.join(late)
    world.check()
    assert world.settle_enter(late, 1) and world.settle_write(late, 1)
    world.check()
