"""Every pitfall says its sentence once, with the figure and the key; most are brought about on the reference engine."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from typing import Any

import pytest
from tests.fakes.engine_world import EngineWorld

from dflash2.config import Config, parse_config
from dflash2.errors import ConfigError
from dflash2.monitoring.advice import INTERVAL_S, REPEAT_S, Advisor
from dflash2.monitoring.pitfalls import RULES, Seen
from dflash2.types import MIB

Sayings = Callable[[str], list[str]]


@pytest.fixture
def said(caplog: pytest.LogCaptureFixture) -> Sayings:
    caplog.set_level(logging.WARNING)
    return lambda name: [line for line in caplog.messages if line.startswith(f"dflash2_advice {name}: ")]


class Told:
    """An advisor over statistics that a test writes down, with a clock that it moves."""

    def __init__(self, config: dict[str, Any] | None = None) -> None:
        self.config = Config.model_validate(config or {})
        self.stats: dict[str, Any] = {}
        self.now = 0.0
        self.advisor = Advisor(clock=lambda: self.now, wall=lambda: 1e9 + self.now)

    def look(self, after_s: float = INTERVAL_S, **stats: Any) -> None:
        self.now += after_s
        self.stats.update(stats)
        self.advisor.step(lambda: self.stats, self.config, lambda: [(7, 4), (9, 2)])


class EngineAdvice:
    """The advisor of a reference engine's runtime, on the engine's clock.

    Args:
        world: the engine.
        config: what is in effect.
        stats: what this machine cannot bring about, in place of the runtime's own figures.
    """

    def __init__(self, world: EngineWorld, config: dict[str, Any] | None = None, **stats: Any) -> None:
        self.world = world
        runtime = world.runtime
        runtime.config = Config.model_validate({"enable": True, **(config or {})})
        runtime.stats_of.update({name: lambda value=value: value for name, value in stats.items()})
        self.advisor = runtime.observer.advisor = Advisor(clock=world.clock, wall=world.clock)

    def run(self, max_steps: int = 4_000) -> None:
        """Until there is no work left, and once more after that."""
        self.world.run(max_steps)
        self.world.clock.advance(INTERVAL_S)
        self.world.engine.idle()


def uses(num: int, in_hbm: int) -> dict[str, Any]:
    return {"counters": {"used_blocks": num, "used_in_hbm_blocks": in_hbm}}


def test_a_hit_rate_below_95_percent_on_the_engine_names_its_blocks(said: Sayings) -> None:
    world = EngineWorld((16, 24, 40))
    advice = EngineAdvice(world)
    world.add_random(24, prompt_tokens=(20, 30), new=(20, 30))
    advice.run()
    rate = world.runtime.cache.counters.hbm_hit_rate
    assert rate < 0.95 and world.runtime.cache.counters.used_blocks > 256
    (line,) = said("hbm-hit-rate")
    assert "Lower concurrency (scheduling.max_running" in line and "memory.hbm_capacity_mb" in line
    named = [(int(block), int(count)) for block, count in re.findall(r"(\d+) \((\d+)\)", line)]
    assert len(named) == 3 and all(count > 1 for _, count in named)


@pytest.mark.parametrize(
    ("in_hbm", "words"),
    [(990, None), (970, "Look at policy.cold_threshold (0.8) before adding concurrency"), (940, "Lower concurrency")],
)
def test_each_level_of_the_hit_rate_has_its_words(in_hbm: int, words: str | None, said: Sayings) -> None:
    told = Told()
    told.look(**uses(1000, in_hbm))
    lines = said("hbm-hit-rate")
    assert len(lines) == (0 if words is None else 1)
    for line in lines:
        assert f"{in_hbm / 1000:.1%}" in line and "block 7 (4), 9 (2)" in line and str(words) in line


def test_few_uses_say_nothing_and_old_ones_are_forgotten(said: Sayings) -> None:
    told = Told()
    told.look(**uses(100, 10))
    told.look(**uses(10_000, 9_910))
    assert said("hbm-hit-rate") == []
    told.look(**uses(10_300, 10_120))
    assert "70.0%" in said("hbm-hit-rate")[0]


def test_a_warning_is_said_once_an_hour(said: Sayings) -> None:
    told = Told()
    for look in range(1, 100):
        told.look(**uses(1000 * look, 500 * look))
    assert len(said("hbm-hit-rate")) == 1
    assert [one["id"] for one in told.advisor.given] == ["hbm-hit-rate"]
    told.look(REPEAT_S, **uses(10**6, 0))
    assert len(said("hbm-hit-rate")) == 2


def test_it_looks_only_now_and_then() -> None:
    told = Told()
    told.look()
    num_looks: list[int] = []
    for _ in range(20):
        told.now += 0.1
        told.advisor.step(lambda: num_looks.append(1) or {}, told.config, list)
    assert num_looks == []


def test_staging_that_is_larger_than_it_can_be_used(said: Sayings) -> None:
    """R-7.1, with what was measured on the way through the staging buffer."""
    world = EngineWorld((16, 16, 24))
    transfer = {"staging_bytes": 3 * MIB, "staging_peak_bytes": MIB}
    advice = EngineAdvice(world, {"memory": {"staging_buffer_size_mb": 1024}}, transfer=transfer)
    world.add_random(6)
    advice.run()
    (line,) = said("staging-size")
    assert "memory.staging_buffer_size_mb is 1024, of which 3 MiB can be used (peak so far 1.0 MiB)" in line
    assert line.endswith("write 3")


def test_a_window_that_fetches_for_nobody(said: Sayings) -> None:
    """R-7.1."""
    told = Told({"kv_block": {"prefetch_window": 8}})
    told.look(counters={"prefetch_used_blocks": 50, "prefetch_wasted_blocks": 50})
    (line,) = said("prefetch-window")
    assert "50% of 100 prefetched blocks" in line and line.endswith("write 4, it widens by itself while that pays")


def test_a_window_that_pays_or_is_the_default_says_nothing(said: Sayings) -> None:
    for window, wasted in ((8, 5), (4, 90)):
        told = Told({"kv_block": {"prefetch_window": window}})
        told.look(counters={"prefetch_used_blocks": 100 - wasted, "prefetch_wasted_blocks": wasted})
    assert said("prefetch-window") == []


def test_nvme_that_takes_stores_slowly(said: Sayings) -> None:
    """R-7.2, as the write pacer sees it."""
    world = EngineWorld((16, 16, 40))
    slow = {"pressed": True, "nvme_stores": {"jobs": 20, "latency_sum_s": 16.0}}
    advice = EngineAdvice(world, transfer=slow)
    world.add_random(6)
    advice.run()
    (line,) = said("nvme-slow")
    assert "800 ms a copy, 20 copies" in line and "policy.swap_batch_size (32)" in line


def test_memory_in_pieces(said: Sayings) -> None:
    """R-7.3. The figures are those of torch's allocator, which exists on a device only."""
    world = EngineWorld((16, 16, 24))
    allocator = {"reserved_bytes": 40_000 * MIB, "allocated_bytes": 30_000 * MIB}
    advice = EngineAdvice(world, allocator=allocator)
    world.add_random(4)
    advice.run()
    (line,) = said("fragmentation")
    assert "41.9 GB of the device, of which 10.5 GB are not in use" in line
    assert "expandable_segments:True" in line and "memory.hbm_reserve_mb (20480)" in line


def test_a_threshold_at_which_everything_is_cold(said: Sayings) -> None:
    """R-7.4: blocks are demoted ahead of need and come back at once. Under LRU every block is cold."""
    world = EngineWorld((20, 30, 60), policy="lru")
    advice = EngineAdvice(world, {"policy": {"cold_threshold": 0.99, "adaptive": False}})
    prompts = [[prompt] * 24 for prompt in range(8)]
    for turn in range(12):
        for prompt in prompts:
            world.add([*prompt, turn % 7], 4)
        advice.run()
    regret = world.runtime.stats()["regret"]
    assert regret["demoted_blocks"] > 64 and regret["regretted_blocks"] > 0
    (line,) = said("cold-threshold")
    assert "policy.cold_threshold 0.99 is too high" in line and "policy.adaptive is off" in line


def test_memory_of_the_machine_is_used_up(said: Sayings) -> None:
    """R-7.5."""
    world = EngineWorld((16, 16, 24))
    advice = EngineAdvice(world, host={"memory_limit_bytes": 100e9, "headroom_bytes": 4e9})
    world.add_random(4)
    advice.run()
    (line,) = said("memory-headroom")
    assert "4.0 GB are left of the 100.0 GB" in line and "memory.dram_capacity_mb" in line


@pytest.mark.parametrize(("has_device", "size", "num"), [(True, 64, 1), (True, 8192, 0), (False, 64, 0)])
def test_shared_memory_of_a_container(has_device: bool, size: int, num: int, said: Sayings) -> None:
    """R-7.6: matters only where worker processes share a device."""
    world = EngineWorld((16, 16, 24))
    advice = EngineAdvice(world, host={"shm_bytes": size * MIB}, has_device=has_device)
    world.add_random(4)
    advice.run()
    assert len(said("shared-memory")) == num
    assert all("64 MiB" in line and "--shm-size=8g" in line for line in said("shared-memory"))


def test_a_relative_path_is_refused_with_the_absolute_one() -> None:
    """R-7.7."""
    with pytest.raises(ConfigError, match=r'probably "/.*/data/kv"'):
        parse_config('{"memory": {"nvme_path": "data/kv"}}')


def test_a_healthy_engine_is_told_nothing(said: Sayings) -> None:
    world = EngineWorld((400, 40, 40))
    advice = EngineAdvice(world, host={"memory_limit_bytes": 100e9, "headroom_bytes": 40e9, "shm_bytes": 64 * MIB})
    world.add_random(40)
    advice.run()
    assert advice.advisor.given == []


def test_no_rule_needs_figures_to_be_there() -> None:
    for rule in RULES.values():
        assert rule(Seen({}, Config())) is None


def test_messages_name_keys_that_exist(said: Sayings) -> None:
    """Every ``section.key`` in a message is one of the file's."""
    told = Told({"kv_block": {"prefetch_window": 8}, "memory": {"staging_buffer_size_mb": 4096}})
    everything = {
        **uses(1000, 500),
        "regret": {"demoted_blocks": 100, "regretted_blocks": 90},
        "transfer": {"pressed": True, "staging_bytes": MIB, "staging_peak_bytes": MIB},
        "allocator": {"reserved_bytes": 10**11, "allocated_bytes": 10**10},
        "host": {"memory_limit_bytes": 100, "headroom_bytes": 1, "shm_bytes": 1},
        "has_device": True,
    }
    everything["counters"].update(prefetch_used_blocks=0, prefetch_wasted_blocks=100)
    told.look(**everything)
    assert {one["id"] for one in told.advisor.given} == set(RULES)
    sections = Config().model_dump()
    for one in told.advisor.given:
        for section, key in re.findall(r"\b(memory|kv_block|policy|scheduling)\.(\w+)", one["text"]):
            assert key in sections[section], one["text"]
