"""Measuring: bounded, through the project's own pools, nothing left behind. No test judges a figure."""

from __future__ import annotations

from pathlib import Path

import pytest

from dflash2.doctor import probes
from dflash2.doctor.cost import swap_cost_lines
from dflash2.doctor.probes import STEPS, measure, probe_size
from dflash2.doctor.profile import DeviceProfile, read_profile, write_profile
from dflash2.errors import ConfigError, StorageError
from dflash2.pools import nvme
from dflash2.pools.fileops import OsFileOps
from dflash2.types import MIB

SMALL = probe_size(MIB // 4, 64 * MIB, 2 * MIB)
PROFILE = DeviceProfile("cpu", 2 * MIB, 8e9, 2e9, 4e9, 1e9, 2e9, "/nvme", "direct")


@pytest.mark.parametrize(
    ("block", "available", "total", "num_blocks", "stride"),
    [
        (None, 1 << 40, 256 * MIB, 128, 2 * MIB),
        (None, 64 * MIB, 256 * MIB, 4, 2 * MIB),
        (4097, 1 << 40, MIB, 128, 8192),
    ],
)
def test_size_is_bounded(block: int | None, available: int, total: int, num_blocks: int, stride: int) -> None:
    size = probe_size(block, available, total)
    assert (size.num_blocks, size.layout.stride_bytes) == (num_blocks, stride)
    assert size.num_bytes <= max(total, 0)


def test_too_little_room_to_measure() -> None:
    with pytest.raises(StorageError, match="too few"):
        probe_size(None, 31 * MIB)


def test_everything_is_measured_and_removed(tmp_path: Path) -> None:
    steps: list[str] = []
    profile = measure(SMALL, tmp_path, steps.append, device="cpu")
    assert steps == list(STEPS)
    figures = (profile.memcpy, profile.hbm_to_dram, profile.dram_to_hbm, profile.nvme_write, profile.nvme_read)
    assert all(figure is not None and figure > 0 for figure in figures)
    assert profile.io_mode in ("direct", "buffered")
    assert list(tmp_path.iterdir()) == []


def test_without_a_folder_the_disk_is_left_out() -> None:
    profile = measure(SMALL, None, lambda name: None, device="cpu")
    assert (profile.nvme_write, profile.nvme_read, profile.io_mode) == (None, None, "")


def test_a_failing_disk_is_an_error_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(OsFileOps, "pwritev", full)
    monkeypatch.setattr(nvme, "native_blocks", lambda: None)
    with pytest.raises(StorageError, match="from dram to nvme failed"):
        measure(SMALL, tmp_path, lambda name: None, device="cpu")
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="cannot measure"):
        measure(SMALL, tmp_path / "absent", lambda name: None, device="cpu")


def test_the_fastest_run_counts_after_a_warm_up(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([0.0, 1.0, 10.0, 15.0, 20.0, 23.0, 30.0, 34.0])
    monkeypatch.setattr(probes.time, "perf_counter", lambda: next(times))
    assert probes._fastest(lambda: None, 3) == 3.0


def test_a_profile_survives_its_file(tmp_path: Path) -> None:
    file = tmp_path / "p.json"
    write_profile(PROFILE, file)
    assert read_profile(file) == PROFILE
    assert '"nvme_read_bytes_per_s": 2000000000.0' in file.read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "cannot read"),
        ("[]", "not a device profile"),
        ('{"format": 9}', "not a device profile"),
        ('{"format": 1, "device": "cpu"}', "memcpy_bytes_per_s"),
    ],
)
def test_a_file_that_is_no_profile(text: str, words: str, tmp_path: Path) -> None:
    file = tmp_path / "p.json"
    file.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match=words):
        read_profile(file)


def test_cost_of_a_swap() -> None:
    # A block of 2 MiB = 2097152 bytes at 4 GB/s is 0.52 ms; 32768 tokens are 256 blocks of 128: 134.2 ms.
    lines = swap_cost_lines(PROFILE, 128, 32768, block_is_the_models=True)
    assert "  DRAM to HBM: 0.52 ms a block, 134.2 ms a sequence" in lines
    assert "  HBM to DRAM: 1.05 ms a block, 268.4 ms a sequence" in lines
    assert "  NVMe to DRAM: 1.05 ms a block, 268.4 ms a sequence" in lines
    assert "  DRAM to NVMe: 2.10 ms a block, 536.9 ms a sequence" in lines
    assert "(256 blocks of 128 tokens) costs:" in lines
