"""Who takes part in a step, and in which order people come and go."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from tests.fakes.engine_world import BLOCK, LIMITS, EngineWorld

from dflash2.cache.sequence import Residency
from dflash2.engine.base import RequestHints
from dflash2.types import Tier


def names(states: object) -> list[str]:
    return [state.request_id for state in states]  # type: ignore[attr-defined]


def schedule(world: EngineWorld):  # type: ignore[no-untyped-def]
    world.runtime.poll()
    return world.scheduler.schedule(world.clock())


# -- one step --------------------------------------------------------------------------------------------------------


def test_a_batch_is_packed_sequence_after_sequence() -> None:
    world = EngineWorld((20, 20, 0))
    world.add([5, 6, 7], 4)
    world.add([8] * 6, 4)
    states, batch = schedule(world)
    assert names(states) == ["q0", "q1"]
    assert batch.token_ids.tolist() == [5, 6, 7, 8, 8, 8, 8, 8, 8]
    assert batch.positions.tolist() == [0, 1, 2, 0, 1, 2, 3, 4, 5]
    assert batch.query_lens.tolist() == batch.context_lens.tolist() == [3, 6]
    assert [len(table) for table in batch.block_tables] == [1, 2]
    assert len(set(np.concatenate(batch.block_tables).tolist())) == 3
    assert batch.wants_logits.tolist() == [True, True]


def test_a_long_prompt_is_cut_to_the_budget_and_wants_logits_at_its_end_only() -> None:
    world = EngineWorld((20, 20, 0), limits=replace(LIMITS, max_batch_tokens=10))
    world.add(list(range(25)), 3)
    seen = []
    for _ in range(4):
        world.step()
        seen.append((world.runner.num_computed, len(world.outputs["q0"])))
    assert seen == [(10, 0), (20, 0), (25, 1), (26, 2)]


def test_decodes_come_before_prompts() -> None:
    world = EngineWorld((20, 20, 0), limits=replace(LIMITS, max_batch_tokens=8))
    world.add([1] * 3, 20)
    world.step()
    world.add([2] * 20, 5)
    for _ in range(2):
        before = len(world.outputs["q0"])
        world.step()
        assert len(world.outputs["q0"]) == before + 1


def test_short_prompts_are_computed_first_and_the_one_that_came_first_gets_a_share() -> None:
    world = EngineWorld((60, 20, 0), limits=replace(LIMITS, max_batch_tokens=16))
    long = world.add([1] * 100, 5)
    world.step()
    progress = []
    for number in range(2, 8):
        world.add([number] * 20, 3)  # more than a step's budget, again and again
        before = world.scheduler.resident[0].blocks.num_tokens
        world.step()
        first = world.scheduler.resident[0]
        assert first.request_id == long
        progress.append(first.blocks.num_tokens - before)
    assert min(progress) >= 3 and max(progress) < 16
    world.run(200)
    world.check_answers()
    assert world.first_step["q1"] < world.first_step[long]


def test_no_more_than_max_running_are_admitted() -> None:
    world = EngineWorld((20, 20, 0), limits=replace(LIMITS, max_running=2))
    world.add_random(5, (3, 5), (3, 5))
    while world.engine.has_work:
        world.step()
        assert world.scheduler.num_running <= 2
    world.check_answers()


def test_who_comes_first_is_admitted_first() -> None:
    world = EngineWorld((20, 10, 0))
    world.add([1] * 20, 50)  # 18 of 29 blocks
    world.add([2] * 20, 50)  # does not fit beside it
    world.add([3] * 20, 45)  # neither does this one, and it is not much shorter
    schedule(world)
    assert names(world.scheduler.waiting) == ["q1", "q2"]
    world.add([4] * 4, 4)  # a short one goes ahead
    schedule(world)
    assert names(world.scheduler.waiting) == ["q1", "q2"]


def test_first_come_first_served_if_asked_for() -> None:
    world = EngineWorld((20, 10, 0), limits=replace(LIMITS, short_first=False))
    world.add([1] * 20, 50)
    world.add([2] * 20, 50)
    world.add([4] * 4, 4)  # would fit, but came later
    schedule(world)
    assert names(world.scheduler.waiting) == ["q1", "q2"]


def test_one_prompt_computed_by_two_at_once_is_computed_once() -> None:
    world = EngineWorld((20, 20, 0))
    prompt = list(range(18))
    world.add(prompt, 3)
    world.add(prompt, 3)
    world.run(50)
    world.check_answers()
    assert world.runner.num_computed == 18 + 2 + 2 + 2
    # The last block is filled by each one's own answer.
    assert world.engine.stats()["counters"]["recomputed_tokens"] == BLOCK


# -- turns -----------------------------------------------------------------------------------------------------------


def test_a_turn_lasts_its_quantum_if_others_wait() -> None:
    world = EngineWorld((10, 20, 0), limits=replace(LIMITS, quantum_tokens=5))
    one, two = world.add([1] * 20, 19), world.add([2] * 20, 19)
    turns: list[tuple[str, int]] = []
    while world.engine.has_work:
        before = {name: len(said) for name, said in world.outputs.items()}
        world.step()
        for name in (one, two):
            produced = len(world.outputs[name]) - before[name]
            if produced and turns and turns[-1][0] == name:
                turns[-1] = (name, turns[-1][1] + produced)
            elif produced:
                turns.append((name, produced))
    assert [name for name, _ in turns] == [one, two] * (len(turns) // 2)
    assert [count for _, count in turns] == [5, 5, 5, 5, 5, 5, 4, 4]
    world.check_answers()


def test_alone_nobody_is_paused() -> None:
    world = EngineWorld((10, 20, 0), limits=replace(LIMITS, quantum_tokens=1))
    world.add([1] * 10, 25)
    world.run(50)
    assert world.scheduler.counters.preemptions_swapped == 0
    assert world.engine.stats()["counters"]["swap_out_blocks"] == 0


def test_who_has_had_the_longest_turn_leaves_next() -> None:
    world = EngineWorld((20, 40, 0))
    for number in range(4):
        world.add([number] * 10, 28)
    while not (world.scheduler.paused and world.scheduler.resident):
        world.step()
    leaving = world.scheduler.leaving_next()
    assert sorted(names(leaving)) == sorted(names(world.scheduler.resident))
    turns = [state.turn_tokens for state in leaving]
    assert turns == sorted(turns, reverse=True)
    assert world.scheduler.upcoming() == list(world.scheduler.paused)


def test_the_policy_is_told_when_paused_requests_run_next() -> None:
    world = EngineWorld((10, 40, 0))
    for number in range(3):
        world.add([number] * 20, 15)
    while len(world.scheduler.paused) < 2 or not all(len(s.blocks.block_ids) for s in world.scheduler.paused):
        world.step()
    next_use = [world.runtime.cache.table.next_use[state.blocks.block_ids] for state in world.scheduler.paused]
    assert all(np.isfinite(one).all() for one in next_use)
    assert next_use[0].max() < next_use[1].min()


def test_who_cannot_grow_pauses_itself_at_a_step_boundary() -> None:
    """Promises cover a turn only; two that stay longer because nobody waits collide when HBM is full."""
    world = EngineWorld((10, 20, 0), limits=replace(LIMITS, quantum_tokens=2))
    world.add([1] * 8, 30)
    world.add([2] * 8, 30)
    world.run(500)
    world.check_answers()
    assert world.scheduler.counters.preemptions_swapped > 0
    assert world.engine.stats()["counters"]["recomputed_tokens"] == 0


# -- dropping --------------------------------------------------------------------------------------------------------


def test_the_youngest_is_dropped_and_comes_back_first() -> None:
    world = EngineWorld((8, 0, 0))
    world.add([1] * 8, 20)
    world.add([2] * 8, 20)
    world.add([3] * 8, 4)
    while not world.scheduler.counters.preemptions_recomputed:
        world.step()
    assert names(world.scheduler.waiting) == ["q2"]
    while world.scheduler.counters.preemptions_recomputed == 1:
        world.step()
    assert names(world.scheduler.waiting)[:1] in (["q1"], ["q2"])
    world.run(500)
    world.check_answers()
    assert world.scheduler.counters.admitted_requests == 3


def test_a_dropped_request_finds_what_is_left_of_its_blocks() -> None:
    world = EngineWorld((10, 0, 0))
    world.add([1] * 12, 20)
    world.add([2] * 12, 20)
    world.run(500)
    world.check_answers()
    seen = world.engine.stats()["counters"]
    assert seen["recomputed_tokens"] > 0
    assert sum(seen[f"hit_tokens_{tier.label}"] for tier in Tier) > 0


def test_waiting_for_room_is_not_a_lookup_each_step() -> None:
    """Hit rates count requests, not the steps for which they wait."""
    world = EngineWorld((8, 0, 0))
    world.add([1] * 8, 20)
    world.add([2] * 26, 4)
    for _ in range(10):
        world.step()
    assert world.engine.stats()["counters"]["looked_up_tokens"] == 8
    world.run(500)
    assert world.engine.stats()["counters"]["looked_up_tokens"] == 34


# -- smoothing -------------------------------------------------------------------------------------------------------


def burst(timeout_s: float = 1e6, cutoff: float | None = 1e-6) -> EngineWorld:
    """Six requests of 13 blocks each in the end; HBM has 20, DRAM the rest."""
    limits = replace(LIMITS, quantum_tokens=4, admission_timeout_s=timeout_s)
    world = EngineWorld((20, 80, 0), limits=limits, smoothing_cutoff=cutoff, reserve="max_tokens")
    for number in range(6):
        world.add([number] * 20, 30)
    return world


def turns_until_the_end(world: EngineWorld) -> int:
    """Times that somebody had to make room."""
    world.run(3_000)
    world.check_answers()
    world.check_all_given_back()
    return world.scheduler.counters.preemptions_swapped


def test_everybody_has_a_first_turn_and_goes_on_when_others_have_ended() -> None:
    world = burst()
    while len(world.first_step) < 6:
        world.step()
        assert not world.reasons, "somebody ended before another one began"
    world.step()
    scheduler = world.scheduler
    assert all(state.turn_is_over for state in scheduler.paused)
    assert scheduler.leaving_next() == []
    assert scheduler.stats()["wait_reasons"]["smoothed"] > 0
    assert turns_until_the_end(world) < 12  # some run out of room in HBM while they grow
    assert world.engine.stats()["scheduler"]["wait_reasons"]["smoothed"] == 0


def test_demand_that_stays_takes_turns() -> None:
    assert turns_until_the_end(burst(cutoff=0.05)) > 24
    assert turns_until_the_end(burst(cutoff=None)) > 24


def test_after_half_of_the_time_to_wait_a_place_is_taken() -> None:
    """A step is 10 ms."""
    assert turns_until_the_end(burst(timeout_s=0.2)) > turns_until_the_end(burst(timeout_s=1.0))


def test_who_took_turns_in_one_burst_asks_anew_in_the_next() -> None:
    world = burst(cutoff=0.05)
    last = world.add([9] * 20, 55)  # runs on when the others have ended
    scheduler = world.scheduler
    let_in = set()
    while len(world.reasons) < 6:
        world.step()
        let_in.update(state.request_id for state in scheduler.every() if state.takes_turns)
    world.step()
    assert last in let_in and not scheduler.admission.under_pressure  # type: ignore[attr-defined]
    assert not any(state.takes_turns or state.is_small for state in scheduler.every())
    world.run(1_000)
    world.check_answers()


def test_small_requests_pass_those_that_wait_for_room() -> None:
    limits = replace(LIMITS, quantum_tokens=30)
    world = EngineWorld((128, 400, 0), smoothing_cutoff=1e-6, limits=limits, max_context_tokens=300)
    for number in range(4):
        world.add([number] * 190, 60, hints=RequestHints(priority=-1))
    small = world.add([9] * 2, 4)  # two blocks, and last in line
    while small not in world.reasons:
        world.step()
    assert world.scheduler.num_running == 4 and world.scheduler.counters.preemptions_swapped == 0
    world.run(3_000)
    world.check_answers()


# -- leaving in any state --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("slots", [(10, 20, 0), (10, 0, 0)])
def test_remove_takes_a_request_out_wherever_it_is(slots: tuple[int, int, int]) -> None:
    world = EngineWorld(slots, copies_end=0.3, limits=replace(LIMITS, quantum_tokens=2))
    kinds = set()
    for _ in range(300):
        if len(world.scheduler.every()) < 4:
            world.add_random(1, (10, 20), (10, 18))
        world.step()
        state = world.rng.choice(world.scheduler.every() or [None])
        if state is not None and world.rng.random() < 0.2:
            kinds.add(state.sequence.residency if state.sequence else None)
            world.engine.cancel(state.request_id)
    assert kinds >= ({None, Residency.RESIDENT} | ({Residency.PAUSED, Residency.ENTERING} if slots[1] else set()))
    for name in world.requests:
        world.engine.cancel(name)
    world.run(5)
    world.check_answers()
    world.check_all_given_back()


def test_peak_counts_what_unfinished_requests_hold() -> None:
    world = EngineWorld((10, 30, 0))
    for number in range(4):
        world.add([number] * 20, 15)
    world.run(500)
    assert world.scheduler.counters.peak_running_tokens > 10 * BLOCK
