"""From a configuration to a runtime, and back after a restart."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from dflash2 import Config, KeyNamespace, KVLayout, Runtime, build, create_runtime
from dflash2.build import check_start
from dflash2.engine.factory import create_engine
from dflash2.errors import CapacityError, ConfigError, StorageError
from dflash2.types import Tier

LAYOUT = KVLayout(num_layers=2, num_kv_heads=2, head_dim=32, block_size=16, dtype="float32")  # 16 KiB a block
SPACE = KeyNamespace("m", "w1", "float32", 16)
PROMPT = np.arange(16 * 70, dtype=np.int32)


def config(path: Path, enable: bool = True, **memory: Any) -> Config:
    sizes = {"hbm_capacity_mb": 2, "dram_capacity_mb": 1, "nvme_capacity_mb": 4, "nvme_path": str(path)}
    values = {"enable": enable, "memory": {**sizes, "staging_buffer_size_mb": 1, **memory}}
    return Config.model_validate({**values, "kv_block": {"block_size": 16}})


def compute(runtime: Runtime, prompt: np.ndarray, fill: float) -> None:
    """Serve a prompt: write ``fill + block index`` into each of its blocks."""
    sequence = runtime.open("r", prompt, 1)
    assert sequence is not None
    new = prompt[sequence.num_tokens :]
    (slots,) = runtime.prepare_step([(sequence, len(new))])
    for index in range(sequence.num_tokens // 16, len(slots)):
        runtime.hbm_tensor[int(slots[index])] = fill + index
    runtime.complete_step([(sequence, new)])
    runtime.close(sequence)


def test_sizes_and_the_start_line(tmp_path: Path) -> None:
    runtime = create_runtime(config(tmp_path), LAYOUT, SPACE)
    assert {tier: runtime.cache.table.capacity(tier) for tier in Tier} == {Tier.HBM: 128, Tier.DRAM: 64, Tier.NVME: 256}
    assert tuple(runtime.hbm_tensor.shape) == (128, *LAYOUT.block_shape)
    assert runtime.startup_line() == "DFlash2: enabled, total virtual cache size 0.0GB, committed 0.0GB"
    runtime.check_integrity()
    runtime.shutdown()
    runtime.shutdown()


def several(path: Path, *names: str, **memory: Any) -> Config:
    """Blocks on several folders; they are made at start."""
    return config(path, nvme_path=None, nvme_paths=[str(path / name) for name in names], **memory)


def test_several_nvme_paths_share_the_capacity_and_are_found_again_in_any_order(tmp_path: Path) -> None:
    first = create_runtime(several(tmp_path, "a", "b", "c"), LAYOUT, SPACE)
    assert first.cache.table.capacity(Tier.NVME) == 256
    sizes = [(tmp_path / name / "rank0" / "data").stat().st_size for name in "abc"]
    assert max(sizes) - min(sizes) <= LAYOUT.stride_bytes and sum(sizes) >= 256 * LAYOUT.stride_bytes
    compute(first, PROMPT, 5)
    first.shutdown()
    again = create_runtime(several(tmp_path, "c", "a", "b"), LAYOUT, SPACE)
    assert again.open("r", PROMPT, 1).num_cached_tokens == len(PROMPT) - 16
    again.check_integrity()
    again.shutdown()


@pytest.mark.parametrize("names", [("a",), ("a", "b", "c"), ("0", "a", "b"), ("b", "c")])
def test_blocks_of_other_nvme_paths_are_never_found_also_when_these_come_back(
    tmp_path: Path, names: tuple[str, ...]
) -> None:
    first = create_runtime(several(tmp_path, "a", "b"), LAYOUT, SPACE)
    compute(first, PROMPT, 5)
    first.shutdown()
    for changed in (names, ("a", "b")):
        runtime = create_runtime(several(tmp_path, *changed), LAYOUT, SPACE)
        assert runtime.open("r", PROMPT, 1).num_cached_tokens == 0
        runtime.check_integrity()
        runtime.shutdown()
    assert [path.parent.parent.name for path in tmp_path.glob("*/rank0/index")].count("b") == 0


def test_each_of_several_nvme_paths_is_checked_before_weights_are_loaded(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(StorageError, match=r"memory\.nvme_paths: .*file"):
        check_start(several(tmp_path, "a", "file"))
    check_start(several(tmp_path, "a", "b"), 2, range(2))
    assert sorted(path.name for path in (tmp_path / "b").iterdir()) == ["rank0", "rank1"]
    owner = create_runtime(several(tmp_path, "b", "c"), LAYOUT, SPACE)
    with pytest.raises(StorageError, match="b/rank0 is in use by process"):
        create_runtime(several(tmp_path, "a", "b"), LAYOUT, SPACE)
    owner.shutdown()


def test_fallback_has_hbm_only_and_says_why(tmp_path: Path) -> None:
    runtime = create_runtime(config(tmp_path / "unused", enable=False), LAYOUT, SPACE)
    assert runtime.startup_line() == "DFlash2: fallback, enable is not true in the configuration"
    assert not runtime.can_swap and runtime.cache.policy.name == "lru"
    assert not (tmp_path / "unused").exists()
    runtime.shutdown()


def test_what_can_be_refused_is_refused_before_weights_are_loaded(tmp_path: Path) -> None:
    fits = config(tmp_path / "kv")
    check_start(fits)
    check_start(config(tmp_path, enable=False, nvme_capacity_mb=10**9))  # needs none
    with pytest.raises(StorageError, match=r"\d+ bytes needed and \d+ must stay free"):
        check_start(config(tmp_path, nvme_capacity_mb=10**9))
    (tmp_path / "file").touch()
    with pytest.raises(StorageError, match="cannot be made"):
        check_start(config(tmp_path / "file"))
    with pytest.raises(ConfigError, match="more than the"):
        check_start(config(tmp_path, dram_capacity_mb=10**9))
    with pytest.raises(StorageError, match="cannot be made"):  # and not: no such model
        create_engine("no such model", config(tmp_path / "file"))
    runtime = create_runtime(fits, LAYOUT, SPACE)
    check_start(fits)  # a server that is about to end does not keep the next one from loading its model
    runtime.shutdown()


def test_space_that_an_earlier_run_holds_counts_as_free(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    create_runtime(config(tmp_path), LAYOUT, SPACE).shutdown()
    stats = os.statvfs(tmp_path)
    left = SimpleNamespace(f_blocks=stats.f_blocks, f_frsize=1 << 20, f_bavail=build.FLOOR_BYTES // (1 << 20) + 1)
    monkeypatch.setattr(os, "statvfs", lambda path: left)
    check_start(config(tmp_path, nvme_capacity_mb=4))
    with pytest.raises(StorageError, match="needed"):
        check_start(config(tmp_path, nvme_capacity_mb=6))
    with pytest.raises(StorageError, match="needed"):
        check_start(config(tmp_path, nvme_capacity_mb=8), 2, range(2))


def test_a_pool_without_two_blocks_is_refused(tmp_path: Path) -> None:
    large = KVLayout(num_layers=40, num_kv_heads=8, head_dim=128, block_size=16, dtype="float32")
    with pytest.raises(CapacityError, match=r"memory\.hbm_capacity_mb"):
        create_runtime(config(tmp_path), large, SPACE)


def test_a_path_that_cannot_be_a_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match=r"memory\.nvme_path"):
        create_runtime(config(tmp_path / "file" / "nvme"), LAYOUT, SPACE)


def test_a_disk_that_is_too_small_is_refused_and_nothing_stays_taken(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="free"):
        create_runtime(config(tmp_path, nvme_capacity_mb=1 << 29), LAYOUT, SPACE)
    runtime = create_runtime(config(tmp_path), LAYOUT, SPACE)
    runtime.shutdown()


def test_files_of_ranks_that_are_no_more_give_their_space_back(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    ranks = [create_runtime(config(tmp_path), LAYOUT, SPACE, world_size=3, rank=rank) for rank in range(3)]
    for runtime in ranks[:2]:
        runtime.shutdown()
    (tmp_path / "rank9").mkdir()
    (tmp_path / "rank9" / "data").write_text("somebody's")
    alone = create_runtime(config(tmp_path), LAYOUT, SPACE)
    assert not (tmp_path / "rank1" / "data").exists() and not (tmp_path / "rank1" / "index").exists()
    assert (tmp_path / "rank2" / "data").exists(), "a process still owns it"
    assert (tmp_path / "rank9" / "data").read_text() == "somebody's", "no rank has been there"
    assert "rank1 is of an earlier run with more ranks" in caplog.text
    alone.shutdown()
    ranks[2].shutdown()
    again = create_runtime(config(tmp_path), LAYOUT, SPACE, world_size=3, rank=2)
    assert (tmp_path / "rank2" / "data").exists()
    again.shutdown()


def test_space_stays_free_beside_the_nvme_files(tmp_path: Path) -> None:
    free = os.statvfs(tmp_path).f_bavail * os.statvfs(tmp_path).f_frsize
    with pytest.raises(StorageError, match="must stay free"):
        create_runtime(config(tmp_path, nvme_capacity_mb=free // 2**20 - 100), LAYOUT, SPACE)


def test_a_second_owner_of_the_path_is_refused(tmp_path: Path) -> None:
    first = create_runtime(config(tmp_path), LAYOUT, SPACE)
    with pytest.raises(StorageError):
        create_runtime(config(tmp_path), LAYOUT, SPACE)
    first.shutdown()


def test_blocks_on_nvme_are_found_again_after_a_restart(tmp_path: Path) -> None:
    runtime = create_runtime(config(tmp_path, dram_capacity_mb=0), LAYOUT, SPACE)
    compute(runtime, PROMPT, fill=1000)
    compute(runtime, PROMPT[::-1].copy(), fill=5000)  # 140 blocks in all: some have to leave for NVMe
    for _ in range(200):
        runtime.rebalance([], [])
        runtime.wait(0.05)
    on_nvme = int(np.count_nonzero(runtime.cache.table.has(runtime.cache.table.live(), Tier.NVME)))
    assert on_nvme >= 12
    runtime.shutdown()

    again = create_runtime(config(tmp_path, dram_capacity_mb=0), LAYOUT, SPACE)
    assert again.cache.table.num_used(Tier.NVME) == 140, "the end kept those that were still in memory"
    again.check_integrity()
    # Blocks leave from the tail, so only a chain whose head was written can be used.
    for prompt, fill in ((PROMPT, 1000), (PROMPT[::-1].copy(), 5000)):
        sequence = again.open("r", prompt, 1)
        assert sequence is not None
        (slots,) = again.prepare_step([(sequence, len(prompt) - sequence.num_tokens)])
        for index in range(sequence.num_cached_tokens // 16):
            assert bool((again.hbm_tensor[int(slots[index])] == fill + index).all())
        again.close(sequence)
    again.shutdown()

    other = create_runtime(config(tmp_path, dram_capacity_mb=0), LAYOUT, KeyNamespace("m", "w2", "float32", 16))
    assert other.cache.table.num_used(Tier.NVME) == 0
    other.shutdown()


def test_what_is_flushed_is_not_found_again_after_a_restart(tmp_path: Path) -> None:
    runtime = create_runtime(config(tmp_path, dram_capacity_mb=0), LAYOUT, SPACE)
    compute(runtime, PROMPT, fill=1000)
    compute(runtime, PROMPT[::-1].copy(), fill=5000)
    for _ in range(50):
        runtime.rebalance([], [])
        runtime.wait(0.05)
    assert runtime.cache.table.num_used(Tier.NVME) > 0
    runtime.flush()
    assert runtime.cache.table.num_used(Tier.NVME) == runtime.cache.table.num_used(Tier.HBM) == 0
    runtime.check_integrity()
    runtime.shutdown()
    again = create_runtime(config(tmp_path, dram_capacity_mb=0), LAYOUT, SPACE)
    assert again.cache.table.num_used(Tier.NVME) == 0
    again.shutdown()
