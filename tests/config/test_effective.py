"""What a configuration means on a machine: bytes per machine, per rank and per device."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflash2.config import Config, EffectiveConfig, MemoryConfig, PolicyConfig, effective
from dflash2.errors import ConfigError
from dflash2.host_memory import MemoryLimit
from dflash2.types import MIB, PAGE_BYTES

LIMIT = MemoryLimit(256_000 * MIB, "cgroup memory.max")
REFERENCE = Config(
    enable=True,
    memory=MemoryConfig(
        hbm_reserve_mb=20480, dram_capacity_mb=128000, nvme_capacity_mb=512000, staging_buffer_size_mb=512
    ),
)


def resolve(config: Config, world_size: int = 1, limit: MemoryLimit = LIMIT) -> EffectiveConfig:
    return effective(config, world_size, memory_limit=limit)


def test_host_tiers_are_divided_and_device_memory_is_not() -> None:
    result = effective(REFERENCE, 8, 3, memory_limit=LIMIT)
    assert result.dram_machine_bytes == 128000 * MIB
    assert result.dram_rank_bytes == 16000 * MIB
    assert result.nvme_machine_bytes == 512000 * MIB
    assert result.nvme_rank_bytes == 64000 * MIB
    assert result.hbm_reserve_bytes == 20480 * MIB
    assert result.staging_buffer_bytes == 512 * MIB
    assert result.hbm_capacity_bytes is None


def test_only_ranks_of_the_same_machine_share() -> None:
    result = effective(REFERENCE, 16, 9, ranks_per_machine=8, memory_limit=LIMIT)
    assert result.dram_rank_bytes == 16000 * MIB


@given(
    ranks=st.integers(1, 64), dram_mb=st.integers(0, 100_000), nvme_mb=st.integers(0, 1 << 30), rank=st.integers(0, 63)
)
def test_shares_are_alike_aligned_and_fit(ranks: int, dram_mb: int, nvme_mb: int, rank: int) -> None:
    config = Config(memory=MemoryConfig(dram_capacity_mb=dram_mb, nvme_capacity_mb=nvme_mb))
    first = effective(config, ranks, 0, memory_limit=LIMIT)
    other = effective(config, ranks, rank % ranks, memory_limit=LIMIT)
    for share, whole in (
        (other.dram_rank_bytes, other.dram_machine_bytes),
        (other.nvme_rank_bytes, other.nvme_machine_bytes),
    ):
        assert share % PAGE_BYTES == 0
        assert 0 <= whole - share * ranks < ranks * PAGE_BYTES
    assert (first.dram_rank_bytes, first.nvme_rank_bytes) == (other.dram_rank_bytes, other.nvme_rank_bytes)


def test_dram_defaults_to_a_quarter_of_what_the_process_may_use() -> None:
    assert resolve(Config(), limit=MemoryLimit(8_000 * MIB + 5, "x")).dram_machine_bytes == 2_000 * MIB


def test_dram_of_zero_is_kept() -> None:
    assert resolve(Config(memory=MemoryConfig(dram_capacity_mb=0))).dram_machine_bytes == 0


def test_default_limit_is_this_machine() -> None:
    assert effective(Config(memory=MemoryConfig(staging_buffer_size_mb=1))).memory_limit.num_bytes > 0


def test_more_dram_than_the_process_may_use() -> None:
    with pytest.raises(
        ConfigError, match=r"more than the 64000 MiB \(cgroup memory.max\).*at most 59904 MiB"
    ) as caught:
        resolve(REFERENCE, 8, MemoryLimit(64_000 * MIB, "cgroup memory.max"))
    assert caught.value.path == "memory.dram_capacity_mb"


def test_staging_of_all_ranks_counts() -> None:
    config = Config(memory=MemoryConfig(dram_capacity_mb=100, staging_buffer_size_mb=500))
    limit = MemoryLimit(1100 * MIB, "x")
    assert resolve(config, 2, limit).dram_rank_bytes == 50 * MIB
    with pytest.raises(ConfigError) as caught:
        resolve(config, 3, limit)
    assert caught.value.path == "memory.staging_buffer_size_mb"


@pytest.mark.parametrize(("world_size", "rank", "ranks"), [(0, 0, 1), (2, 2, 2), (2, -1, 2), (2, 0, 3), (2, 0, 0)])
def test_contradicting_ranks(world_size: int, rank: int, ranks: int) -> None:
    with pytest.raises(ValueError, match="rank"):
        effective(Config(), world_size, rank, ranks_per_machine=ranks, memory_limit=LIMIT)


def test_nvme_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/somebody")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert resolve(Config()).nvme_path == Path("/home/somebody/.cache/dflash2")
    monkeypatch.setenv("XDG_CACHE_HOME", "relative/is/ignored")
    assert resolve(Config()).nvme_path == Path("/home/somebody/.cache/dflash2")
    monkeypatch.setenv("XDG_CACHE_HOME", "/cache")
    assert resolve(Config()).nvme_path == Path("/cache/dflash2")
    assert resolve(Config(memory=MemoryConfig(nvme_path="/nvme/../data/"))).nvme_path == Path("/data")


def test_several_nvme_paths_are_the_same_in_any_order() -> None:
    for written in (["/b", "/a/../a"], ["/a", "/b/"]):
        resolved = resolve(Config(memory=MemoryConfig(nvme_paths=written, nvme_capacity_mb=4000)))
        assert resolved.nvme_paths == (Path("/a"), Path("/b")) and resolved.nvme_path == Path("/a")
        assert "memory.nvme_paths = /a, /b, 2.1GB on each" in resolved.describe()
        assert "memory.nvme_path = see nvme_paths (default)" in resolved.describe()


def test_describe_shows_machine_and_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/cache")
    lines = effective(REFERENCE, 8, 3, memory_limit=LIMIT).describe()
    assert lines[0] == "rank 3 of 8, 8 on this machine; memory limit 268.4GB (cgroup memory.max)"
    assert "memory.dram_capacity_mb = 128000 MiB (134.2GB) per machine, 16.8GB per rank (8 ranks)" in lines
    assert "memory.nvme_capacity_mb = 512000 MiB (536.9GB) per machine, 67.1GB per rank (8 ranks)" in lines
    assert "memory.hbm_reserve_mb = 20480 MiB (21.5GB) per device" in lines
    assert "memory.hbm_capacity_mb = the device's memory less reserve and staging (default)" in lines
    assert "memory.nvme_path = /cache/dflash2 (default)" in lines
    assert "memory.nvme_daily_write_mb = no limit (default)" in lines
    assert "kv_block.block_size = 128 tokens (default)" in lines
    assert "policy.refresh_interval_s = 1.0 s (default)" in lines
    assert "policy.swap_batch_size = 32 blocks (default)" in lines
    assert "enable = true" in lines


def test_describe_names_every_key_once_and_marks_the_defaults() -> None:
    config = Config(policy=PolicyConfig(eviction="lru"))
    lines = resolve(config).describe()[1:]
    sections = {name: type(value) for name, value in config if hasattr(value, "model_fields_set")}
    expected = [name for name in Config.model_fields if name not in sections]
    expected += [f"{name}.{key}" for name, model in sections.items() for key in model.model_fields]
    assert sorted(line.split(" = ")[0] for line in lines) == sorted(expected)
    assert [line for line in lines if not line.endswith("(default)")] == ["policy.eviction = lru"]


def test_what_may_be_written_a_day_is_for_the_machine() -> None:
    config = Config(memory=MemoryConfig(dram_capacity_mb=64, nvme_daily_write_mb=4000))
    resolved = effective(config, 8, 3, memory_limit=LIMIT)
    assert resolved.nvme_daily_write_bytes == 500 * 2**20
    assert "memory.nvme_daily_write_mb = 4000 MiB (4.2GB) per machine" in resolved.describe()
