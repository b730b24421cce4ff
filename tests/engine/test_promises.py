"""Reservations that follow estimates: they grow, shrink, and when nobody's can grow somebody gives way."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.fakes.engine_world import LIMITS, EngineWorld

from dflash2.cache.admission import WaitReason
from dflash2.engine.base import FinishReason
from dflash2.errors import QueueFull
from dflash2.policy.base import Outcome


def estimates(world: EngineWorld) -> dict[str, int]:
    return world.engine.stats()["scheduler"]["estimates"]


def test_a_reservation_grows_before_it_is_used_up() -> None:
    world = EngineWorld((20, 20, 0), reserve="prompt")
    world.add([1] * 8, 40)
    while world.engine.has_work:
        world.step()
        for state in world.scheduler.resident:
            promised = world.runtime.ledger.promised_to(state.request_id)
            assert promised >= len(state.blocks.block_ids) + state.blocks.growth_blocks
    world.check_answers()
    assert estimates(world)["underestimated_requests"] == 1
    assert estimates(world)["extended_blocks"] == 12 - 3
    world.check_all_given_back()


def test_tokens_in_a_block_that_is_reserved_whole_are_no_underestimate() -> None:
    world = EngineWorld((20, 20, 0), reserve="prompt")
    world.add([1] * 5, 3)  # 6 tokens are reserved, 8 needed: two blocks either way
    world.run(50)
    assert world.outputs["q0"] and estimates(world)["underestimated_requests"] == 0


def test_when_no_reservation_can_grow_the_youngest_gives_its_own_up() -> None:
    """All tiers together have room for one of them at its end, and two begin."""
    world = EngineWorld((10, 4, 0), reserve="prompt", limits=replace(LIMITS, quantum_tokens=2))
    for number in range(3):
        world.add([number] * 8, 30)
    world.run(2_000)
    world.check_answers()
    scheduler = world.scheduler.counters
    assert scheduler.growth_waits > 0 and scheduler.preemptions_recomputed > 0
    assert scheduler.admitted_requests == 3
    assert set(world.reasons.values()) == {FinishReason.LENGTH}
    world.check_all_given_back()


def test_what_is_learned_is_given_back_to_those_who_wait() -> None:
    """Many short answers are seen; a request that reserved for a long one gives most of it to the next request."""
    world = EngineWorld((80, 5, 0), max_context_tokens=400)
    promises = world.scheduler.promises  # type: ignore[attr-defined]
    world.add([1] * 8, 250)
    world.step()
    assert world.runtime.ledger.num_promised == world.runtime.layout.num_blocks(8 + 250)
    state = world.scheduler.resident[0]
    for _ in range(20):
        promises.estimator.note(promises.kind_of(state), 50, ended=True)
    world.add([2] * 40, 200)  # does not fit beside what the first one reserved
    world.step()
    assert estimates(world)["given_back_blocks"] > 40
    assert world.scheduler.num_running == 2
    world.engine.cancel("q0")
    world.engine.cancel("q1")
    world.run(5)
    world.check_all_given_back()


def test_max_tokens_reserves_everything_and_nothing_ever_grows() -> None:
    world = EngineWorld((12, 20, 0), reserve="max_tokens", limits=replace(LIMITS, quantum_tokens=2))
    for number in range(6):
        world.add([number] * 10, 30)
    world.run(2_000)
    world.check_answers()
    assert estimates(world)["extended_blocks"] == world.scheduler.counters.growth_waits == 0


def test_tiers_that_shrink_below_a_request_that_waits_do_not_end_the_engine() -> None:
    world = EngineWorld((20, 20, 0), reserve="max_tokens")
    world.add([1] * 8, 64)
    world.runtime.ledger.shrink(10)
    world.step()
    assert [state.wait_reason for state in world.scheduler.waiting] == [WaitReason.ROOM]
    world.engine.cancel("q0")
    world.run(5)
    world.check_all_given_back()


def test_an_answer_that_its_reader_ends_is_whole_and_one_that_its_client_leaves_is_not() -> None:
    for ends, reason in ((True, FinishReason.STOP), (False, FinishReason.CANCELLED)):
        world = EngineWorld((20, 20, 0))
        told = watch_policy(world)
        learned: list[bool] = []
        promises = world.scheduler.promises  # type: ignore[attr-defined]
        promises.estimator.note = lambda kind, count, *, ended, into=learned: into.append(ended)
        name = world.add([1] * 8, 40)
        world.step()
        world.engine.end_answer(name, 0) if ends else world.engine.cancel(name)
        world.engine.cancel(name)  # as the front end does when it closes the stream
        world.run(5)
        assert world.reasons[name] is reason
        assert told == ["q0 arrives", f"q0 ends: {reason.value}"] and learned == [ends]


@pytest.mark.parametrize("slots", [(10, 4, 0), (10, 0, 0)])
def test_a_request_that_gave_its_blocks_up_and_comes_back_is_no_new_turn(slots: tuple[int, int, int]) -> None:
    world = EngineWorld(slots, reserve="prompt", limits=replace(LIMITS, quantum_tokens=2))
    told = watch_policy(world)
    for number in range(3):
        world.add([number] * 8, 30)
    dropped_left = None
    for _ in range(2_000):
        if not world.engine.has_work:
            break
        world.step()
        back = [state for state in world.scheduler.waiting if state.admitted]
        if back and dropped_left is None and world.scheduler.counters.preemptions_recomputed > 1:
            dropped_left = back[0].request_id  # ends while it has no sequence
            world.engine.cancel(dropped_left)
    assert dropped_left is not None
    assert sorted(told) == sorted(
        line
        for name in world.requests
        for line in (f"{name} arrives", f"{name} ends: {'cancelled' if name == dropped_left else 'length'}")
    )
    world.check_all_given_back()


def watch_policy(world: EngineWorld) -> list[str]:
    """What the policy is told of requests from now on."""
    told: list[str] = []
    policy = world.runtime.cache.policy
    on_arrival, on_finish = policy.on_arrival, policy.on_finish

    def arrival(request_id: str, *more: object) -> None:
        told.append(f"{request_id} arrives")
        on_arrival(request_id, *more)  # type: ignore[arg-type]

    def finish(request_id: str, outcome: Outcome | None, now: float) -> None:
        told.append(f"{request_id} ends: {None if outcome is None else outcome.stop_reason}")
        on_finish(request_id, outcome, now)

    policy.on_arrival, policy.on_finish = arrival, finish  # type: ignore[method-assign]
    return told


def test_answers_that_end_early_are_counted_as_overestimated() -> None:
    world = EngineWorld((20, 20, 0))
    world.add([1] * 8, 40)
    for _ in range(3):
        world.step()
    world.engine.cancel("q0")
    world.run(5)
    assert estimates(world)["overestimated_requests"] == 1
    assert world.runtime.ledger.num_promised == 0


def test_a_full_queue_refuses_and_changes_nothing() -> None:
    world = EngineWorld((10, 10, 0), limits=replace(LIMITS, max_waiting=2))
    for number in range(2):
        world.add([number] * 4, 4)
    with pytest.raises(QueueFull, match=r"2 requests wait already, .* \(scheduling.max_waiting\)"):
        world.add([9] * 4, 4)
    assert world.scheduler.counters.refused_requests == 1
    world.run(50)
    world.check_answers()


def test_a_request_says_what_it_waits_for() -> None:
    world = EngineWorld((10, 4, 0), limits=replace(LIMITS, admission_timeout_s=1.0), smoothing_cutoff=0.001)
    world.add([1] * 8, 28)
    world.add([2] * 8, 28)  # all tiers together have no room for both
    world.add([3] * 8, 28)
    world.step()
    reasons = world.engine.stats()["scheduler"]["wait_reasons"]
    assert reasons["queued"] == 1 and sum(reasons.values()) == 2
    world.clock.advance(2.0)
    world.step()
    error = world.last["q2"].error
    assert "too busy to begin with this request within 1 s" in str(error)
    world.engine.cancel("q0")
    world.run(5)
    world.check_all_given_back()


def test_pressure_ends_with_the_load_though_nobody_waits_any_more() -> None:
    world = EngineWorld((10, 40, 0), smoothing_cutoff=0.01)
    for number in range(3):
        world.add([number] * 8, 28)
    admission = world.scheduler.admission  # type: ignore[attr-defined]
    world.step()
    assert admission.under_pressure and len(world.scheduler.paused) > 0
    world.run(1_000)
    world.check_answers()
    assert not admission.under_pressure


def test_a_request_that_waits_for_room_is_counted_once_however_long_it_waits() -> None:
    world = EngineWorld((10, 4, 0), reserve="max_tokens")
    world.add([1] * 8, 28)
    world.add([2] * 8, 28)
    for _ in range(10):
        world.step()
    assert [state.wait_reason for state in world.scheduler.waiting] == [WaitReason.ROOM]
    assert world.engine.stats()["counters"]["reservations_refused"] == 1
    world.run(200)
    assert world.engine.stats()["counters"]["reservations_refused"] == 1
    world.check_answers()


def test_ten_cold_chats_without_a_limit_do_not_wait_for_each_other() -> None:
    """Each may use the whole context; together that is seven times what there is."""
    world = EngineWorld((480, 200, 0), max_context_tokens=2_000)
    for number in range(10):
        world.add([number] * 8, 1_900)
    world.step()
    assert world.scheduler.num_running == 10
    for number in range(10):
        world.engine.cancel(f"q{number}")
    world.run(5)
    world.check_all_given_back()
