"""Several answers and beams of one request: forks that are swapped, dropped, cancelled; each reads its own past."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np
import pytest
import torch
from tests.fakes.engine_world import LIMITS, EngineWorld
from tests.fakes.hash_model import VOCAB, spread_after

from dflash2.engine.base import FinishReason, GenerationRequest, TokenOutput
from dflash2.engine.beam import Beam, BeamSearch
from dflash2.engine.logprobs import candidates, token_logprobs
from dflash2.engine.sampling import SamplingParams, branch_seed, sample
from dflash2.errors import ModelError, RequestTooLarge
from dflash2.types import Urgency

TIERS = {"three tiers": (20, 16, 60), "no DRAM": (20, 0, 70), "no NVMe": (20, 70, 0), "HBM only": (24, 0, 0)}


@dataclass
class BranchWorld(EngineWorld):
    """Also knows which answer a token belongs to."""

    answers: dict[tuple[str, int], list[int]] = field(default_factory=dict)
    ends: dict[tuple[str, int], TokenOutput] = field(default_factory=dict)
    told: dict[tuple[str, int], list[object]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.runner.spread = True

    def ask(self, prompt: list[int], **sampling: object) -> str:
        name = f"q{len(self.requests)}"
        params = SamplingParams(**{"seed": 7, **sampling})  # type: ignore[arg-type]
        request = GenerationRequest(name, np.array(prompt, np.int32), params, self.clock())
        self.engine.add(request)
        self.requests[name] = request
        self.outputs[name] = []
        return name

    def step(self) -> None:
        for ticket in self.transfer.in_flight:
            if self.rng.random() < self.copies_end:
                self.transfer.end(ticket)
        for output in self.engine.step():
            key = (output.request_id, output.index)
            assert key not in self.ends, "an answer ended twice"
            if output.token_id is not None:
                self.answers.setdefault(key, []).append(output.token_id)
                self.told.setdefault(key, []).append(output.logprobs)
            if output.finish_reason is not None:
                self.ends[key] = output
                if output.ends_request:
                    assert output.request_id not in self.reasons
                    self.reasons[output.request_id] = output.finish_reason
        self.clock.advance(self.step_s)
        self.check()

    def check_answers(self) -> None:
        for name, request in self.requests.items():
            if request.sampling.beam_width is not None:
                self._check_beams(name, request)
                continue
            for (owner, index), said in self.answers.items():
                if owner == name:
                    assert said == expected(request, index, len(said)), f"{name}#{index} read wrong KV"

    def _check_beams(self, name: str, request: GenerationRequest) -> None:
        answers = [self.answers[key] for key in sorted(self.answers) if key[0] == name]
        if self.reasons[name] is not FinishReason.CANCELLED:
            assert answers == beams(request), f"{name} searched in wrong KV"


def expected(request: GenerationRequest, index: int, count: int) -> list[int]:
    """One answer of the reference: no blocks, no batch, no other branch."""
    tokens = request.token_ids.tolist()
    seed = branch_seed(request.sampling.seed, index)
    for step in range(count):
        chosen = sample(spread_after(tokens)[None], [request.sampling], [seed], [step])
        tokens.append(int(chosen.token_ids[0]))
    return tokens[len(request.token_ids) :]


def beams(request: GenerationRequest) -> list[list[int]]:
    """The same search over the reference's logits."""
    sampling, prompt = request.sampling, request.token_ids.tolist()
    ends = frozenset(sampling.stop_token_ids)
    search = BeamSearch(sampling.beam_width, sampling.max_tokens, sampling.length_penalty, ends)
    live: list[tuple[tuple[int, ...], float]] = [((), 0.0)]
    while live:
        now = [
            Beam(tokens, score, candidates(spread_after([*prompt, *tokens]), search.num_candidates))
            for tokens, score in live
        ]
        live = [((*now[c.parent].token_ids, c.token_id), c.score) for c in search.advance(now)]
    return [list(answer.token_ids) for answer in search.best(sampling.n)]


def prompt(world: EngineWorld, low: int = 3, high: int = 30) -> list[int]:
    return [world.rng.randrange(VOCAB) for _ in range(world.rng.randint(low, high))]


# -- several answers -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("copies_end", [1.0, 0.4])
@pytest.mark.parametrize("tiers", TIERS)
def test_answers_that_exceed_hbm_together_are_right_and_each_its_own(tiers: str, copies_end: float) -> None:
    world = BranchWorld(TIERS[tiers], copies_end=copies_end)
    names = [world.ask(prompt(world), n=n, max_tokens=12) for n in (4, 1, 3, 2, 4)]
    world.run(4_000)
    world.check_answers()
    assert [sum(key[0] == name for key in world.ends) for name in names] == [4, 1, 3, 2, 4]
    assert all(end.finish_reason is FinishReason.LENGTH for end in world.ends.values())
    assert all(len(said) == 12 for said in world.answers.values())
    assert len({tuple(world.answers[names[0], index]) for index in range(4)}) > 1
    stats = world.engine.stats()["scheduler"]
    below = tiers != "HBM only"
    assert stats["preemptions_swapped"] > 0 if below else stats["preemptions_recomputed"] > 0
    world.check_all_given_back()


def test_the_prompt_is_computed_once_for_all_answers() -> None:
    world = BranchWorld(TIERS["three tiers"])
    world.ask([1] * 14, n=4, max_tokens=3)
    world.run(50)
    assert world.runner.num_computed == 14 + 4 * 2
    world.check_answers()


def test_all_answers_are_reserved_or_none() -> None:
    world = BranchWorld((20, 12, 0))  # 31 blocks may be promised
    first = world.ask([1] * 9, n=4, max_tokens=11)  # 2 shared blocks, 4 times 3 of their own
    world.ask([2] * 9, n=4, max_tokens=11)
    third = world.ask([3] * 9, n=4, max_tokens=11)
    world.step()
    assert world.runtime.ledger.num_promised == 28
    assert [state.request_id for state in world.scheduler.waiting] == [third]
    while first not in world.reasons:
        world.step()
        assert world.runtime.ledger.num_promised in (14, 28)
    world.run(500)
    world.check_answers()
    world.check_all_given_back()


def test_a_request_whose_answers_never_fit_is_refused() -> None:
    world = BranchWorld((20, 12, 0))
    with pytest.raises(RequestTooLarge, match="all its branches"):
        world.ask([1] * 9, n=16, max_tokens=11)
    with pytest.raises(RequestTooLarge, match="at once"):
        world.ask([1] * 60, n=2, max_tokens=30)
    assert not world.engine.has_work


def test_one_answer_can_be_ended_and_the_others_go_on() -> None:
    world = BranchWorld(TIERS["three tiers"])
    name = world.ask([1, 2, 3, 4, 5], n=3, max_tokens=10)
    for _ in range(4):
        world.step()
    world.engine.end_answer(name, 1)
    world.engine.end_answer(name, 9)
    world.run(100)
    world.check_answers()
    reasons = [world.ends[name, index].finish_reason for index in range(3)]
    assert reasons == [FinishReason.LENGTH, FinishReason.STOP, FinishReason.LENGTH]
    assert [world.ends[name, index].more_to_come for index in range(3)].count(False) == 1
    world.check_all_given_back()


@pytest.mark.parametrize("tiers", TIERS)
@pytest.mark.parametrize("seed", range(3))
def test_cancelled_anywhere_everything_is_given_back(tiers: str, seed: int) -> None:
    world = BranchWorld(TIERS[tiers], seed=seed, copies_end=0.5)
    for kind in ({"n": 3}, {"beam_width": 3}, {"n": 2}, {"beam_width": 4, "n": 2}, {"n": 1}):
        world.ask(prompt(world), max_tokens=10, **kind)
    for _ in range(3_000):
        if not world.engine.has_work:
            break
        world.step()
        for name in world.requests:
            if name not in world.reasons and world.rng.random() < 0.02:
                index = world.rng.choice([None, 0, 1, 2])
                world.engine.cancel(name) if index is None else world.engine.end_answer(name, index)
    assert not world.engine.has_work
    world.check_all_given_back()


def test_a_stop_token_ends_one_answer_only() -> None:
    world = BranchWorld(TIERS["three tiers"])
    whole = BranchWorld(TIERS["three tiers"])
    asked = {"n": 2, "max_tokens": 8}
    other = whole.ask([9, 8, 7], **asked)
    whole.run(50)
    stop = next(t for t in whole.answers[other, 0][:-1] if t not in whole.answers[other, 1])
    name = world.ask([9, 8, 7], stop_token_ids=(stop,), **asked)
    world.run(50)
    assert world.answers[name, 0] == whole.answers[other, 0][: whole.answers[other, 0].index(stop) + 1]
    assert world.answers[name, 1] == whole.answers[other, 1]
    assert world.ends[name, 0].finish_reason is FinishReason.STOP


@pytest.mark.parametrize("kind", [{"n": 3}, {"beam_width": 3}])
def test_broken_logits_end_what_they_touch(kind: dict[str, int]) -> None:
    world = BranchWorld(TIERS["three tiers"])
    world.runner.broken = {4}
    name = world.ask([1, 2, 3], max_tokens=10, **kind)
    world.run(50)
    ends = [end for key, end in world.ends.items() if key[0] == name]
    assert len(ends) == 3 and all(isinstance(end.error, ModelError) for end in ends)
    world.check_all_given_back()


@pytest.mark.parametrize("seed", range(4))
def test_lost_blocks_of_forks_are_computed_again(seed: int) -> None:
    world = BranchWorld(TIERS["three tiers"], seed=seed, copies_end=0.0)
    world.transfer.prompt = True
    for kind in ({"n": 3}, {"beam_width": 2}, {"n": 4}, {"n": 2}, {"n": 3}):
        world.ask(prompt(world), max_tokens=12, **kind)
    for _ in range(4_000):
        if not world.engine.has_work:
            break
        if world.rng.random() < 0.15 and not world.transfer.fail_next:
            world.transfer.fail_next.append((False, True))
        world.step()
    world.check_answers()
    assert world.engine.stats()["counters"]["lost_blocks"] > 0
    world.check_all_given_back()


def test_a_branch_that_gives_up_a_load_has_room_for_what_it_computes_again() -> None:
    """Its sisters keep the blocks that it cannot wait for."""
    world = BranchWorld((12, 60, 0), limits=replace(LIMITS, load_timeout_s=2.0, quantum_tokens=3), step_s=0.5)
    for first in (1, 2):
        world.ask([first] * 16, n=3, max_tokens=10)
    stuck: set[int] = set()
    for _ in range(300):
        if not world.engine.has_work:
            break
        world.copies_end = 0.0
        for ticket in set(world.transfer.in_flight) - stuck:
            world.transfer.end(ticket)
        world.step()
        if not stuck:
            flights = world.transfer.flights.items()
            stuck = {ticket for ticket, flight in flights if flight.job.urgency is Urgency.DEMAND}
            world.transfer.deaf = bool(stuck)
    assert stuck and not world.engine.has_work
    world.check_answers()
    assert world.engine.stats()["scheduler"]["load_timeouts"] > 0
    world.check_all_given_back()


# -- beams -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("copies_end", [1.0, 0.4])
@pytest.mark.parametrize("tiers", TIERS)
def test_beams_under_pressure_find_what_the_reference_finds(tiers: str, copies_end: float) -> None:
    world = BranchWorld(TIERS[tiers], copies_end=copies_end)
    kinds = [{"beam_width": 4, "n": 2}, {"beam_width": 2}, {"n": 2}, {"beam_width": 3, "n": 3, "length_penalty": 0.0}]
    for kind in kinds * 2:
        world.ask(prompt(world, 10, 30), max_tokens=8, stop_token_ids=(5, 6), **kind)
    world.run(6_000)
    world.check_answers()
    stats = world.engine.stats()["scheduler"]
    assert stats["preemptions_swapped"] + stats["preemptions_recomputed"] > 0
    world.check_all_given_back()


def test_hbm_for_one_beam_is_enough_for_all() -> None:
    """Each waits for the others' tokens: who waits gives its place up."""
    world = BranchWorld((7, 40, 0), limits=replace(LIMITS, quantum_tokens=50))
    world.ask(list(range(10)), beam_width=4, max_tokens=12)
    world.run(2_000)
    world.check_answers()
    assert world.scheduler.counters.preemptions_swapped > 0
    world.check_all_given_back()


def test_beams_of_two_requests_do_not_hold_each_other_up_without_lower_tiers() -> None:
    world = BranchWorld((14, 0, 0), limits=replace(LIMITS, quantum_tokens=50))
    for first in (1, 2, 3):
        world.ask([first] * 7, beam_width=4, max_tokens=6)
    world.run(2_000)
    world.check_answers()
    world.check_all_given_back()


# -- log-probabilities -----------------------------------------------------------------------------------------------


def test_logprobs_are_those_of_the_models_own_distribution() -> None:
    world = BranchWorld(TIERS["three tiers"])
    plain = world.ask([1, 2, 3], max_tokens=4)
    name = world.ask([4, 5, 6, 7], n=2, logprobs=3, max_tokens=4, temperature=0.5)
    world.run(50)
    assert world.told[plain, 0] == [None] * 4
    for index in range(2):
        said = world.answers[name, index]
        for step, told in enumerate(world.told[name, index]):
            reference = spread_after([4, 5, 6, 7, *said[:step]]).log_softmax(0)
            top = reference.topk(3)
            assert told.logprob == pytest.approx(float(reference[said[step]]), abs=1e-5)
            assert list(told.top_ids) == top.indices.tolist()
            assert told.top_logprobs == pytest.approx(top.values.tolist(), abs=1e-5)


def test_rows_that_ask_for_different_numbers() -> None:
    logits = torch.tensor([[0.0, 1.0, 2.0], [3.0, 1.0, 2.0], [0.0, 0.0, 5.0]])
    told = token_logprobs(logits, [2, 1, 0], [0, None, 20])
    assert told[0].top_ids == () and told[0].logprob == pytest.approx(float(logits[0].log_softmax(0)[2]))
    assert told[1] is None
    assert len(told[2].top_ids) == 3 and told[2].top_ids[0] == 2
