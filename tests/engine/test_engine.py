"""The engine over tiny tiers: whatever is swapped, dropped, lost or late, every answer is the reference's."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from tests.fakes.engine_world import BLOCK, LIMITS, NAMESPACE, EngineWorld, make_runtime
from tests.fakes.hash_model import answer, layout, words_of

from dflash2.engine.base import FinishReason, GenerationRequest
from dflash2.engine.sampling import SamplingParams
from dflash2.errors import DeadlineExceeded, ModelError, RequestError, RequestTooLarge
from dflash2.policy.base import Outcome
from dflash2.pools.dram import DramPool
from dflash2.pools.nvme import NvmePool
from dflash2.pools.tensor import TensorPool
from dflash2.transfer.cpu_copy import CpuCopier
from dflash2.transfer.engine import ThreadedTransferEngine
from dflash2.types import MIB, Tier, Urgency

TIERS = {"three tiers": (20, 16, 40), "no DRAM": (20, 0, 50), "no NVMe": (20, 50, 0)}
PRESSURE = (16, 0, 0)
"""HBM only, and little of it."""


def counters(world: EngineWorld) -> dict[str, int]:
    return world.engine.stats()["counters"] | world.engine.stats()["scheduler"]


# -- right answers under pressure ------------------------------------------------------------------------------------


@pytest.mark.parametrize("copies_end", [1.0, 0.3])
@pytest.mark.parametrize("policy", ["heat", "lru"])
@pytest.mark.parametrize("tiers", TIERS)
def test_requests_that_exceed_hbm_are_swapped_and_never_recomputed(tiers: str, policy: str, copies_end: float) -> None:
    world = EngineWorld(TIERS[tiers], policy, copies_end=copies_end)
    world.add_random(14)
    steps = world.run(3_000)
    world.check_answers()
    seen = counters(world)
    assert seen["preemptions_swapped"] > 0 and seen["swap_out_blocks"] > 0 and seen["swap_in_blocks"] > 0
    assert seen["recomputed_tokens"] == 0 and seen["preemptions_recomputed"] == 0
    assert seen["peak_running_tokens"] > 1.5 * 20 * BLOCK
    assert world.runner.num_computed == sum(
        len(request.token_ids) + request.sampling.max_tokens - 1 for request in world.requests.values()
    )
    assert steps < 1_500
    world.check_all_given_back()


@pytest.mark.long
def test_many_mixtures(test_scale: int) -> None:
    for seed in range(12 * test_scale):
        tiers = list(TIERS.values())[seed % 3]
        limits = replace(LIMITS, quantum_tokens=1 + seed % 9, max_batch_tokens=8 + 5 * (seed % 7), max_running=20)
        world = EngineWorld(tiers, ["heat", "lru"][seed % 2], limits, seed=seed, copies_end=0.2 + seed % 5 / 5)
        world.add_random(8)
        for _ in range(60):
            world.step()
        world.add_random(8)
        world.run(4_000)
        world.check_answers()
        assert counters(world)["recomputed_tokens"] == 0
        world.check_all_given_back()


@pytest.mark.parametrize("policy", ["heat", "lru"])
@pytest.mark.parametrize("slots", [PRESSURE, (16, 8, 0)])
def test_without_swapping_what_was_dropped_is_computed_again(slots: tuple[int, int, int], policy: str) -> None:
    world = EngineWorld(slots, policy, recompute=True)
    world.add_random(10)
    world.run(3_000)
    world.check_answers()
    seen = counters(world)
    assert seen["preemptions_recomputed"] > 0 and seen["preemptions_swapped"] == 0
    assert seen["admitted_requests"] == 10
    world.check_all_given_back()


def test_real_pools_and_threads(tmp_path: Path) -> None:
    shape, slots = layout(BLOCK), (20, 12, 60)
    hbm = TensorPool(slots[0], shape, CpuCopier())
    pools = {
        Tier.HBM: hbm,
        Tier.DRAM: DramPool(slots[1], shape),
        Tier.NVME: NvmePool([tmp_path], "rank0", slots[2], shape, NAMESPACE.root()),
    }
    transfer = ThreadedTransferEngine(pools, MIB, swap_batch_size=4, io_threads=2)
    world = EngineWorld(slots)
    words = words_of(hbm.tensor)
    world.attach(make_runtime(slots, transfer, world.clock, words, pools=pools), words)  # type: ignore[arg-type]
    world.add_random(14)
    world.run(20_000)
    world.check_answers()
    seen = counters(world)
    assert seen["preemptions_swapped"] > 0 and seen["loaded_from_nvme_blocks"] > 0
    assert seen["recomputed_tokens"] == 0 and seen["failed_copies"] == 0
    world.engine.close()
    world.engine.close()


def test_a_shared_prefix_is_computed_once_and_read_by_all() -> None:
    world = EngineWorld(TIERS["three tiers"])
    head = list(range(12))
    world.add([*head, 1], 4)
    world.run(100)
    for ending in (2, 3, 4):
        world.add([*head, ending, 5], 6)
    world.run(100)
    world.check_answers()
    assert [world.last[f"q{i}"].num_cached_tokens for i in range(4)] == [0, 12, 12, 12]
    assert counters(world)["recomputed_tokens"] == 0


def test_tenants_do_not_share() -> None:
    world = EngineWorld(TIERS["three tiers"])
    for salt in ("a", "b", None):
        world.add(list(range(12)), 2, tenant_salt=salt)
        world.run(50)
    world.check_answers()
    assert [world.last[f"q{i}"].num_cached_tokens for i in range(3)] == [0, 0, 0]


# -- ends ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("slots", [TIERS["three tiers"], PRESSURE])
@pytest.mark.parametrize("seed", range(3))
def test_cancelled_anywhere_the_others_go_on(slots: tuple[int, int, int], seed: int) -> None:
    world = EngineWorld(slots, seed=seed, copies_end=0.5)
    world.add_random(14)
    while world.engine.has_work:
        world.step()
        for name in world.requests:
            if name not in world.reasons and world.rng.random() < 0.01:
                world.engine.cancel(name)
                world.engine.cancel(name)
        assert world.runner.num_steps < 3_000
    world.engine.cancel("unknown")
    world.check_answers()
    assert set(world.reasons.values()) == {FinishReason.LENGTH, FinishReason.CANCELLED}
    world.check_all_given_back()


def test_who_is_not_admitted_in_time_is_told_so() -> None:
    world = EngineWorld((8, 8, 0), limits=replace(LIMITS, admission_timeout_s=0.2))
    first = world.add([1] * 4, 25)
    second = world.add([2] * 4, 25)
    late = world.add([3] * 4, 25)
    world.run(500)
    world.check_answers()
    assert world.reasons[first] is FinishReason.LENGTH
    assert FinishReason.TIMEOUT in {world.reasons[second], world.reasons[late]}
    timed_out = [name for name, reason in world.reasons.items() if reason is FinishReason.TIMEOUT]
    assert all(isinstance(world.last[name].error, DeadlineExceeded) for name in timed_out)
    assert counters(world)["timed_out_requests"] == len(timed_out)
    world.check_all_given_back()


def test_stop_tokens_end_an_answer_and_are_part_of_it() -> None:
    world = EngineWorld(TIERS["three tiers"])
    expected = answer([1, 2, 3], 20)
    stop = expected[5]
    sampling = SamplingParams(max_tokens=20, temperature=0.0, stop_token_ids=(stop,))
    world.engine.add(GenerationRequest("s", np.array([1, 2, 3], np.int32), sampling, 0.0))
    world.outputs["s"] = []
    world.run(50)
    assert world.reasons["s"] is FinishReason.STOP
    assert world.outputs["s"] == expected[: expected.index(stop) + 1]


def test_the_policy_is_told_how_a_request_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    world = EngineWorld(TIERS["three tiers"])
    told: list[tuple[str, Outcome | None]] = []
    policy = world.engine.runtime.cache.policy
    monkeypatch.setattr(policy, "on_finish", lambda request_id, outcome, now: told.append((request_id, outcome)))
    world.add([1, 2, 3], max_tokens=7)
    world.step()
    assert told == []
    world.run(50)
    assert told == [("q0", Outcome("length", 7))]


def test_the_context_limits_prompt_and_answer_together() -> None:
    world = EngineWorld(TIERS["three tiers"], max_context_tokens=20)
    world.add([1] * 15, 100)
    world.run(50)
    assert len(world.outputs["q0"]) == 5


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "error"),
    [
        ([1] * 60, 30, RequestTooLarge),
        ([], 5, RequestError),
        ([1] * 200, 5, RequestError),
        ([1, 50], 5, RequestError),
        ([-1], 5, RequestError),
        ([1], 0, RequestError),
    ],
)
def test_what_cannot_be_served_is_refused_at_once(prompt: list[int], max_tokens: int, error: type[Exception]) -> None:
    world = EngineWorld(TIERS["three tiers"])
    with pytest.raises(error):
        world.add(prompt, max_tokens)
    assert not world.engine.has_work and world.runtime.ledger.num_promised == 0
    world.add([1] * 60, 20)
    world.run(100)
    world.check_answers()


def test_what_hbm_holds_of_one_request_can_be_asked_for_and_is_served() -> None:
    world = EngineWorld((20, 16, 40), max_context_tokens=10_000)
    most = world.engine.max_resident_tokens
    assert most == 20 * BLOCK
    name = world.add([1, 2, 3], most - 3)
    with pytest.raises(RequestTooLarge):
        world.add([1, 2, 3], most - 2)
    world.run(2_000)
    assert len(world.outputs[name]) == most - 3


def test_an_id_in_use_is_refused() -> None:
    world = EngineWorld(TIERS["three tiers"])
    world.add([1], 5)
    request = world.requests["q0"]
    with pytest.raises(RequestError, match="in use"):
        world.engine.add(request)
    world.run(50)
    world.engine.add(request)
    assert world.engine.has_work


def test_logits_that_are_not_finite_end_the_request_not_the_engine() -> None:
    world = EngineWorld(TIERS["three tiers"])
    world.runner.broken = {3}
    broken = world.add([1, 2, 3], 10)
    world.run(50)
    assert world.reasons[broken] is FinishReason.ERROR and isinstance(world.last[broken].error, ModelError)
    world.add([4, 5], 10)
    world.run(50)
    assert world.reasons["q1"] is FinishReason.LENGTH
    world.check_all_given_back()


# -- faults ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("tiers", TIERS)
def test_lost_blocks_are_computed_again_and_the_answer_is_right(tiers: str, seed: int) -> None:
    world = EngineWorld(TIERS[tiers], seed=seed, copies_end=0.0)
    world.transfer.prompt = True
    world.add_random(14)
    while world.engine.has_work:
        if world.rng.random() < 0.03 and not world.transfer.fail_next:
            world.transfer.fail_next.append((False, True))
        world.step()
        assert world.runner.num_steps < 4_000
    world.check_answers()
    seen = counters(world)
    assert seen["lost_blocks"] > 0 and seen["recomputed_tokens"] > 0
    world.check_all_given_back()


def test_loads_that_fail_for_now_are_tried_again() -> None:
    world = EngineWorld(TIERS["three tiers"], copies_end=0.0)
    world.transfer.prompt = True
    world.add_random(14)
    while world.engine.has_work:
        if world.rng.random() < 0.2 and not world.transfer.fail_next:
            world.transfer.fail_next.append((False, False))
        world.step()
        assert world.runner.num_steps < 4_000
    world.check_answers()
    assert counters(world)["failed_copies"] > 0 and counters(world)["recomputed_tokens"] == 0


def test_a_load_that_never_ends_is_given_up_and_computed_again() -> None:
    world = EngineWorld((20, 40, 0), limits=replace(LIMITS, load_timeout_s=2.0), step_s=0.5, copies_end=0.0)
    for first in (1, 2, 3):
        world.add([first] * 20, 12)
    stuck: set[int] = set()
    while not stuck:
        end_all_but(world, stuck)
        world.step()
        in_flight = world.transfer.flights.items()
        stuck = {ticket for ticket, flight in in_flight if flight.job.urgency is Urgency.DEMAND}
    world.transfer.deaf = True
    for _ in range(200):
        if world.engine.has_work:
            end_all_but(world, stuck)
            world.step()
    assert not world.engine.has_work and set(world.transfer.in_flight) == stuck
    world.check_answers()
    assert counters(world)["load_timeouts"] == 1 and counters(world)["recomputed_tokens"] > 0
    world.check_all_given_back()


def end_all_but(world: EngineWorld, stuck: set[int]) -> None:
    for ticket in set(world.transfer.in_flight) - stuck:
        world.transfer.end(ticket)


# -- nobody starves --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tiers", TIERS)
def test_everybody_gets_a_turn_while_long_requests_run(tiers: str) -> None:
    world = EngineWorld(TIERS[tiers])
    for number in range(3):
        world.add([number] * 8, 60)
    for _ in range(30):
        world.step()
    late = [world.add([10 + number] * 30, 5) for number in range(2)]
    start = world.runner.num_steps
    world.run(2_000)
    world.check_answers()
    # One turn of those before it and one prompt each; far below the 60 steps that the long ones take.
    assert all(world.first_step[name] - start < 30 for name in late)


def test_a_large_request_is_not_passed_by_small_ones_for_ever() -> None:
    world = EngineWorld((20, 60, 0))
    world.add_random(4, (3, 6), (20, 30))
    for _ in range(5):
        world.step()
    large = world.add([7] * 60, 10)
    start = world.runner.num_steps
    while large not in world.reasons:
        if len(world.requests) < 200 and len(world.scheduler.every()) < 8:
            world.add_random(1, (3, 6), (10, 20))
        world.step()
        assert world.runner.num_steps - start < 300
    world.run(3_000)
    world.check_answers()


def test_after_close_nothing_is_held() -> None:
    world = EngineWorld(TIERS["three tiers"])
    world.add_random(8)
    for _ in range(20):
        world.step()
    world.engine.close()
    assert not world.engine.has_work and world.runtime.ledger.num_promised == 0
    world.runtime.cache.check_integrity()
