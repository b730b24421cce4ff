"""LoRA in the engine: peft's answers, several adapters in one batch, more adapters than room, and nobody else waits."""

from __future__ import annotations

import shutil
from collections import deque
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.engine.lora_case import make_adapter, peft_answer
from tests.engine.paged_case import tiny_model
from tests.fakes.engine_world import EngineWorld
from tests.server.model_server import tiny_engine

from dflash2.engine.adapters import PATIENCE_S, Adapters
from dflash2.engine.base import FinishReason, GenerationRequest, TokenOutput
from dflash2.engine.engine import ReferenceEngine
from dflash2.engine.fingerprint import model_fingerprint
from dflash2.engine.lora_layers import copy_numbers
from dflash2.engine.model_loader import LoadedModel
from dflash2.engine.sampling import SamplingParams
from dflash2.errors import DeadlineExceeded, ModelError, RequestError
from dflash2.pipeline.adapter_cache import AdapterCache, Loaded, Work
from dflash2.pipeline.adapter_file import AdapterSpec, AdapterWeights
from dflash2.pipeline.adapter_registry import AdapterRegistry

NUM_ADAPTERS = 16


@pytest.fixture(scope="module")
def plain() -> Any:
    """Without hooks and without paged attention: what peft works on."""
    return tiny_model()


@pytest.fixture(scope="module")
def folders(plain: Any, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    root = tmp_path_factory.mktemp("adapters")
    return [make_adapter(plain, root / f"a{seed}", seed, r=2 + seed % 3) for seed in range(NUM_ADAPTERS)]


def loaded() -> LoadedModel:
    model = tiny_model()
    model.requires_grad_(False)
    return LoadedModel(model, "tiny", "float32", model_fingerprint(model))


def engine_with(adapters: dict[str, Path], **lora: Any) -> ReferenceEngine:
    return tiny_engine(loaded(), lora={"adapters": {name: str(path) for name, path in adapters.items()}, **lora})


def ask(engine: ReferenceEngine, name: str, prompt: list[int], adapter: str | None, count: int = 8, n: int = 1) -> None:
    sampling = SamplingParams(max_tokens=count, temperature=0.0, n=n)
    now = engine.runtime.clock()
    engine.add(GenerationRequest(name, np.array(prompt, np.int32), sampling, now, adapter=adapter))


def run(engine: ReferenceEngine, max_steps: int = 200_000) -> dict[str, list[int]]:
    said: dict[str, list[int]] = {}
    for _ in range(max_steps):
        if not engine.has_work:
            engine.check_integrity()
            engine.adapters.cache.check_integrity()  # type: ignore[union-attr]
            return said
        for output in engine.step():
            assert output.error is None, output
            if output.token_id is not None and output.index == 0:
                said.setdefault(output.request_id, []).append(output.token_id)
    raise AssertionError("it does not end")


def prompt(seed: int, length: int = 11) -> list[int]:
    return np.random.default_rng(seed).integers(0, 90, length).tolist()


# -- what is computed ------------------------------------------------------------------------------------------------


def test_one_batch_with_several_adapters_says_what_peft_says(plain: Any, folders: list[Path]) -> None:
    engine = engine_with({f"a{i}": folders[i] for i in range(3)})
    wanted = [None, "a0", "a1", "a0", None, "a2", "a1"]
    for number, adapter in enumerate(wanted):
        ask(engine, f"r{number}", prompt(number), adapter)
    said = run(engine)
    for number, adapter in enumerate(wanted):
        folder = None if adapter is None else folders[int(adapter[1:])]
        assert said[f"r{number}"] == peft_answer(plain, folder, prompt(number), 8), adapter
    assert len({tuple(said[f"r{number}"]) for number in range(7)}) > 4
    engine.close()


def test_branches_have_their_requests_adapter(plain: Any, folders: list[Path]) -> None:
    engine = engine_with({"a0": folders[0]})
    ask(engine, "r", prompt(1), "a0", n=3)
    ask(engine, "base", prompt(2), None)
    said = run(engine)
    assert said["r"] == peft_answer(plain, folders[0], prompt(1), 8)
    assert said["base"] == peft_answer(plain, None, prompt(2), 8)
    engine.close()


@pytest.mark.parametrize(
    "options",
    [
        {"use_rslora": True},
        {"rank_pattern": {"q_proj": 7, "layers.1.mlp.up_proj": 3}, "alpha_pattern": {"layers.0.self_attn.q_proj": 3}},
        {"target_modules": ["q_proj", "down_proj"]},
        {"layers_to_transform": [1]},
    ],
)
def test_what_peft_can_set_is_understood(plain: Any, tmp_path: Path, options: dict[str, Any]) -> None:
    folder = make_adapter(plain, tmp_path / "one", 5, **options)
    engine = engine_with({"one": folder})
    ask(engine, "r", prompt(3), "one")
    assert run(engine)["r"] == peft_answer(plain, folder, prompt(3), 8)
    engine.close()


def test_the_base_model_is_computed_bit_for_bit_as_without_adapters(folders: list[Path]) -> None:
    def logits(engine: ReferenceEngine) -> list[torch.Tensor]:
        seen: list[torch.Tensor] = []
        plain_run = engine._runner.run
        engine._runner.run = lambda batch: seen.append(plain_run(batch)) or seen[-1]  # type: ignore[method-assign, func-returns-value]
        ask(engine, "r", prompt(4), None)
        while engine.has_work:
            engine.step()
        engine.close()
        return seen

    without = logits(tiny_engine(loaded()))
    beside = logits(engine_with({"a0": folders[0]}))
    assert all(torch.equal(one, other) for one, other in zip(without, beside, strict=True))


def test_closing_the_engine_takes_the_adapters_off_the_model(folders: list[Path]) -> None:
    model = loaded()
    engine = tiny_engine(model, lora={"adapters": {"a": str(folders[0])}})
    assert any(module._forward_hooks for module in model.model.modules())
    engine.close()
    assert not any(module._forward_hooks for module in model.model.modules())


# -- keys ------------------------------------------------------------------------------------------------------------


def test_kv_of_one_adapter_never_serves_another(plain: Any, folders: list[Path]) -> None:
    engine = engine_with({"a0": folders[0], "a1": folders[1]})
    same = prompt(6, 40)
    for number, adapter in enumerate([None, "a0", "a1"] * 2):
        ask(engine, f"r{number}", same, adapter)
        assert run(engine)[f"r{number}"] == peft_answer(plain, [folders[0], folders[1], None][number % 3 - 1], same, 8)
    counters = engine.stats()["counters"]
    assert counters["hit_tokens_hbm"] == 3 * 32, "each finds its own, and nobody another's"
    engine.close()


def test_other_weights_under_the_same_name_share_nothing(plain: Any, folders: list[Path], tmp_path: Path) -> None:
    engine = engine_with({}, directory=str(tmp_path))
    registry = engine.adapters.registry  # type: ignore[union-attr]
    same = prompt(7, 40)
    for number in (0, 1):
        shutil.copytree(folders[number], tmp_path / f"v{number}")
        registry.add("name", tmp_path / f"v{number}")
        ask(engine, "r", same, "name")
        assert run(engine)["r"] == peft_answer(plain, folders[number], same, 8)
        engine.adapters.forget(registry.remove("name"))  # type: ignore[union-attr]
    assert engine.stats()["counters"]["hit_tokens_hbm"] == 0
    engine.close()


def test_a_request_keeps_the_adapter_that_was_unregistered_meanwhile(plain: Any, folders: list[Path]) -> None:
    engine = engine_with({"a0": folders[0]})
    ask(engine, "r", prompt(8), "a0")
    said: list[int] = []
    while engine.has_work:
        said += [output.token_id for output in engine.step() if output.token_id is not None]
        if len(said) == 2:
            engine.adapters.forget(engine.adapters.registry.remove("a0"))  # type: ignore[union-attr]
    assert said == peft_answer(plain, folders[0], prompt(8), 8)
    assert engine.stats()["adapters"]["slots_used"] == 0
    with pytest.raises(RequestError, match="no adapter 'a0'"):
        ask(engine, "again", prompt(8), "a0")
    engine.close()


def test_files_that_changed_on_disk_are_not_used(folders: list[Path], tmp_path: Path) -> None:
    shutil.copytree(folders[0], tmp_path / "a")
    engine = engine_with({"a": tmp_path / "a"})
    shutil.copy(folders[3] / "adapter_model.safetensors", tmp_path / "a" / "adapter_model.safetensors")
    ask(engine, "r", prompt(9), "a")
    outputs: list[TokenOutput] = []
    while engine.has_work:
        outputs += engine.step()
    assert [o.finish_reason for o in outputs] == [FinishReason.ERROR]
    assert isinstance(outputs[0].error, ModelError) and "changed" in str(outputs[0].error)
    engine.close()


# -- more adapters than room -----------------------------------------------------------------------------------------


def test_sixteen_adapters_cycle_through_room_for_four(plain: Any, folders: list[Path]) -> None:
    engine = engine_with({f"a{i}": folder for i, folder in enumerate(folders)}, max_loaded=4, dram_capacity_mb=0)
    for round_number in range(2):
        for i in range(NUM_ADAPTERS):
            ask(engine, f"r{round_number}.{i}", prompt(i), f"a{i}", count=5)
        said = run(engine)
        for i in range(NUM_ADAPTERS):
            assert said[f"r{round_number}.{i}"] == peft_answer(plain, folders[i], prompt(i), 5)
    stats = engine.stats()["adapters"]
    assert stats["evictions"] >= 2 * NUM_ADAPTERS - 8 and stats["failed"] == 0
    assert stats["pinned_adapters"] == 0 and stats["slots_used"] == 4
    engine.close()


# -- nobody else waits (a slow loader, the hash model, no clock but the test's) --------------------------------------


class SlowLoader:
    """Each piece of work takes so many polls."""

    def __init__(self, num_polls: int) -> None:
        self.num_polls = num_polls
        self.fail: Exception | None = None
        self.filled: dict[int, str] = {}
        self._queue: deque[list[Any]] = deque()

    def read(self, spec: AdapterSpec) -> None:
        self._queue.append([self.num_polls, Loaded(spec.digest, Work.READ, weights={}, error=self.fail)])

    def fill(self, spec: AdapterSpec, weights: AdapterWeights, slot: int) -> None:
        self.filled[slot] = spec.digest
        self._queue.append([self.num_polls, Loaded(spec.digest, Work.FILL)])

    def poll(self) -> Iterable[Loaded]:
        if self._queue:
            self._queue[0][0] -= 1
            if self._queue[0][0] <= 0:
                yield self._queue.popleft()[1]

    def close(self, timeout_s: float) -> None:
        self._queue.clear()


class LoraWorld(EngineWorld):
    def with_adapters(self, num_slots: int, loader: SlowLoader, names: str) -> None:
        self.loader = loader
        registry = AdapterRegistry({}, 4)
        for name in names:
            registry._specs[name] = AdapterSpec(name, Path("/none"), name * 8, {}, 100, 100)
        self.adapters = Adapters(registry, AdapterCache(num_slots, 10_000, loader))
        self.engine.adapters = self.adapters

    def check(self) -> None:
        super().check()
        self.adapters.cache.check_integrity()


def lora_world(num_slots: int, num_polls: int, names: str = "abcdef") -> LoraWorld:
    world = LoraWorld((40, 80, 0))
    world.adapters = Adapters(AdapterRegistry({}, 4), AdapterCache(num_slots, 0, SlowLoader(1)))
    world.with_adapters(num_slots, SlowLoader(num_polls), names)
    return world


def test_base_requests_never_wait_for_an_adapter() -> None:
    """Its load takes 60 steps; each base request says a token in every step from its first on."""
    world = lora_world(2, num_polls=60)
    tuned = world.add([1, 2, 3], 5, adapter="a")
    alone = EngineWorld((40, 80, 0))
    base = [world.add([n, n + 1, n + 2], 20) for n in range(4)]
    for n in range(4):
        alone.add([n, n + 1, n + 2], 20)
    for _ in range(20):
        world.step()
        alone.step()
        assert [len(world.outputs[name]) for name in base] == [len(alone.outputs[f"q{n}"]) for n in range(4)]
    assert world.outputs[tuned] == [] and all(name in world.reasons for name in base)
    world.run(500)
    assert world.reasons[tuned] is FinishReason.LENGTH
    assert world.adapters.stats(world.clock())["pinned_adapters"] == 0
    world.check_all_given_back()


def test_an_adapter_is_pinned_from_its_slot_to_the_end_of_its_last_request() -> None:
    world = lora_world(1, num_polls=2)
    first, second = world.add([1, 2], 12, adapter="a"), world.add([3, 4], 20, adapter="a")
    other = world.add([5, 6], 3, adapter="b")
    while second not in world.reasons:
        world.step()
        assert world.outputs[other] == []
    assert first in world.reasons and world.loader.filled == {0: "a" * 8}
    world.run(100)
    assert world.reasons[other] is FinishReason.LENGTH and world.loader.filled == {0: "b" * 8}


def test_who_waits_for_a_place_is_not_passed_for_ever() -> None:
    world = lora_world(2, num_polls=1)
    for adapter in "abab":
        world.add([1, 2, 3], 12, adapter=adapter)
    for _ in range(5):
        world.step()
    rare, since = world.add([7], 3, adapter="c"), world.clock()
    for step in range(2_000):
        if len(world.scheduler.every()) < 4:
            world.add([step % 40, 5], 12, adapter="ab"[step % 2])
        world.step()
        if rare in world.reasons:
            break
    assert world.reasons[rare] is FinishReason.LENGTH
    assert world.clock() - since < 2 * PATIENCE_S
    world.run(5_000)


def test_an_adapter_that_cannot_be_loaded_fails_its_requests_only_and_is_tried_again() -> None:
    world = lora_world(2, num_polls=2)
    world.loader.fail = ModelError("gone")
    bad = [world.add([1, 2], 5, adapter="a") for _ in range(2)]
    good = world.add([3, 4], 5)
    world.run(100)
    assert [world.reasons[name] for name in bad] == [FinishReason.ERROR] * 2
    assert "gone" in str(world.last[bad[0]].error) and world.reasons[good] is FinishReason.LENGTH
    world.loader.fail = None
    again = world.add([1, 2], 5, adapter="a")
    world.run(100)
    assert world.reasons[again] is FinishReason.LENGTH
    world.check_all_given_back()


def test_cancelled_and_expired_while_the_adapter_loads() -> None:
    world = lora_world(2, num_polls=10**6)
    cancelled, expired = world.add([1], 5, adapter="a"), world.add([2], 5, adapter="b")
    world.step()
    world.engine.cancel(cancelled)
    world.step()
    assert world.reasons[cancelled] is FinishReason.CANCELLED
    world.clock.advance(2e6)
    world.step()
    assert world.reasons[expired] is FinishReason.TIMEOUT
    assert isinstance(world.last[expired].error, DeadlineExceeded)
    assert not world.engine.has_work and world.adapters.stats(0.0)["waiting_requests"] == 0
    assert world.scheduler.counters.timed_out_requests == 1


def test_what_is_worth_keeping_is_kept_before_the_end_waits_for_a_loader() -> None:
    world = lora_world(2, num_polls=1)
    ended: list[str] = []
    world.engine.runtime.shutdown = lambda: ended.append("runtime")  # type: ignore[method-assign]
    world.loader.close = lambda timeout_s: ended.append("loader")  # type: ignore[method-assign]
    world.engine.close()
    assert ended == ["runtime", "loader"]


def test_a_name_that_is_unknown_is_refused_at_once() -> None:
    world = lora_world(2, num_polls=1)
    with pytest.raises(RequestError, match="no adapter 'zz'"):
        world.add([1], 5, adapter="zz")
    with pytest.raises(RequestError, match="has no adapters"):
        EngineWorld((8, 8, 0)).add([1], 2, adapter="a")


@pytest.mark.parametrize("target", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("source", [torch.float32, torch.float16, torch.bfloat16])
def test_numbers_of_a_file_reach_the_device_as_they_are(source: torch.dtype, target: torch.dtype) -> None:
    numbers = torch.tensor([[0.5, -1.25, 3.0], [2.0, -0.0078125, 96.0]])  # exact in all of them
    stored = numbers.to(source)
    array = stored.view(torch.uint16).numpy() if source is torch.bfloat16 else stored.numpy()
    room = torch.zeros(2, 4, 3, dtype=target)
    copy_numbers(room[1, :2], array)
    copy_numbers(room[0, :3, :2], array.T)
    assert torch.equal(room[1, :2].float(), numbers) and torch.equal(room[0, :3, :2].float(), numbers.T)
    assert not room[1, 2:].any()
