from __future__ import annotations

import numpy as np
import pytest
from tests.replay.running import BYTES_PER_TOKEN, events_of, make_plan, silent
from tests.replay.small_trace import SMALL_TRACE

from dflash2.config import Config
from dflash2.errors import ConfigError, RequestError
from dflash2.replay.caches import Managed, make_replayed
from dflash2.replay.classical.clairvoyant import fewest_writes
from dflash2.replay.classical.opt import optimal_hits
from dflash2.replay.device import DeviceModel
from dflash2.replay.managed import BlockNames, BlockSize
from dflash2.replay.report import write_savings
from dflash2.replay.run import replay
from dflash2.replay.session import run_plan
from dflash2.replay.sizes import parse_capacity, slots_of_config
from dflash2.types import MIB, Tier

SLOTS = {Tier.HBM: 64, Tier.DRAM: 96, Tier.NVME: 700}


def blocks(*numbers: int) -> np.ndarray:
    return np.array(numbers, np.int32)


@pytest.mark.parametrize("policy", ["heat", "lru"])
def test_table_index_and_copies_add_up(policy: str) -> None:
    one = make_replayed(policy, SLOTS, Config(), BlockSize(512, 1024), BlockNames())
    assert isinstance(one, Managed)
    replay(events_of(SMALL_TRACE.read_text()), (one,))
    one.cache.check_integrity()
    outcomes, counters = one.outcomes(), one.cache.cache.counters
    assert sum(outcomes.hits_by_tier().values()) == outcomes.num_hits > 0
    assert counters.loaded_from_nvme_blocks >= outcomes.hits_by_tier()["nvme"] > 0
    assert outcomes.movement.nvme_blocks_written == counters.demoted_to_nvme_blocks > 0
    assert outcomes.movement.bytes_in % 1024 == 0


def test_a_request_larger_than_hbm_is_refused_and_finds_nothing() -> None:
    one = make_replayed("lru", {Tier.HBM: 2, Tier.DRAM: 9}, Config(), BlockSize(512, 1024), BlockNames())
    line = '{"timestamp": %d, "input_length": 1024, "output_length": 1, "hash_ids": %s}\n'
    replay(events_of(line % (0, [1, 2]) + line % (9000, [1, 2, 3]) + line % (18000, [1, 2])), (one,))
    assert [sum(hits) for hits in one.outcomes().hits] == [0, 0, 2]


def test_write_through_writes_what_it_computes() -> None:
    """Three blocks of NVMe: 1 2 3, then 4 costs the end of the first request its place."""
    line = '{"timestamp": %d, "input_length": 1024, "output_length": 1, "hash_ids": %s}\n'
    text = line % (0, [1, 2, 3]) + line % (9000, [1, 4]) + line % (18000, [1, 2, 3])
    slots = {Tier.HBM: 1, Tier.DRAM: 2, Tier.NVME: 3}
    one = make_replayed("write-through", slots, Config(), BlockSize(512, 1024), BlockNames())
    replay(events_of(text), (one,))
    assert one.outcomes().hits == [(0, 0, 0), (1, 0, 0), (1, 0, 1)]
    assert one.outcomes().movement.nvme_blocks_written == 3 + 1 + 1


def test_the_clairvoyant_writes_only_what_comes_back_too_late_for_memory() -> None:
    requests = [blocks(0, 1), blocks(2, 3), blocks(0, 1), blocks(4), blocks(0)]
    foreseen = fewest_writes(requests, memory=1, nvme=9, wanted_hits=3)
    assert foreseen.num_hits == 3 and foreseen.num_writes == 1
    assert foreseen.in_memory.tolist() == [0, 0, 1, 0, 1] and foreseen.on_nvme.tolist() == [0, 0, 1, 0, 0]
    spared = fewest_writes(requests, memory=1, nvme=9, wanted_hits=2)
    assert spared.num_hits == 2 and spared.num_writes == 0


def test_without_a_limit_the_clairvoyant_finds_what_the_optimum_finds() -> None:
    requests = [event.blocks for event in events_of(SMALL_TRACE.read_text()) if hasattr(event, "blocks")]
    foreseen = fewest_writes(requests, memory=256, nvme=0, wanted_hits=10**9)
    assert (foreseen.in_memory == optimal_hits(requests, 256)).all() and foreseen.num_writes == 0


def test_the_report_says_how_far_heat_gets() -> None:
    policies = ("heat", "write-through", "clairvoyant")
    results = run_plan(make_plan(SMALL_TRACE, policies, [SLOTS]), silent())
    heat, most, fewest = (result.nvme_bytes_written for result in results)
    assert fewest < most
    (line,) = write_savings(results)
    assert f"heat goes {100 * (most - heat) / (most - fewest):.0f} % of the way" in line
    assert results[2].outcomes.num_hits >= results[1].outcomes.num_hits


def test_sizes_from_a_configuration() -> None:
    memory = {"hbm_capacity_mb": 100, "dram_capacity_mb": 400, "nvme_capacity_mb": 1000}
    config = Config.model_validate({"memory": memory})
    assert slots_of_config(config, 2, 2 * MIB) == {Tier.HBM: 50, Tier.DRAM: 100, Tier.NVME: 250}
    with pytest.raises(ConfigError, match=r"memory\.hbm_capacity_mb: a replay has no device"):
        slots_of_config(Config(), 1, MIB)
    with pytest.raises(ConfigError, match="hold no block"):
        slots_of_config(config, 1, 200 * MIB)
    (result,) = run_plan(make_plan(SMALL_TRACE, ("lru",), (), config), silent())
    assert result.slots == slots_of_config(config, 1, 512 * BYTES_PER_TOKEN)


def test_sizes_from_the_command_line() -> None:
    assert parse_capacity("7") == {Tier.HBM: 7}
    assert parse_capacity("7/8/9") == {Tier.HBM: 7, Tier.DRAM: 8, Tier.NVME: 9}
    for wrong in ("", "0", "-1", "1/0", "1/2/3/4", "many"):
        with pytest.raises(RequestError, match="is not a number of blocks"):
            parse_capacity(wrong)


def test_a_policy_that_is_not_there_is_named_with_those_that_are() -> None:
    with pytest.raises(RequestError, match="no policy 'arc' for several tiers; choose from heat, lru, write-through"):
        make_replayed("arc", SLOTS, Config(), BlockSize(512, 1024), BlockNames())


@pytest.mark.parametrize(("blocks_per_s", "near"), [(1000, 8), (0.001, 4)])
def test_while_a_request_waits_its_blocks_come_nearer_as_fast_as_the_disk_reads(blocks_per_s: float, near: int) -> None:
    """Half a second, in bursts of four blocks; a burst that has begun is finished."""
    line = '{"timestamp": %d, "input_length": 4096, "output_length": 1, "hash_ids": %s}\n'
    requests = [list(range(10 * number, 10 * number + 8)) for number in range(6)]
    text = "".join(line % (9000 * number, blocks) for number, blocks in enumerate(requests)) + line % (
        90000,
        requests[0],
    )
    device = DeviceModel(nvme_read=blocks_per_s * 1024, admission_s=0.5)
    config = Config.model_validate({"policy": {"high_watermark": 0.5, "low_watermark": 0.25}})
    slots = {Tier.HBM: 16, Tier.DRAM: 32, Tier.NVME: 100}
    one = make_replayed("lru", slots, config, BlockSize(512, 1024), BlockNames(), device)
    replay(events_of(text), (one,))
    outcomes = one.outcomes()
    assert outcomes.hits[-1] == (0, 0, 8)
    assert outcomes.movement.awaited_from_nvme == 8
    assert outcomes.movement.brought_near == near
    assert outcomes.movement.prefetched == outcomes.movement.prefetched_used == near
