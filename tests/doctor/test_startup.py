"""What a server says at its start."""

from __future__ import annotations

import json
from pathlib import Path

from tests.doctor.fake_machine import GOOD, MIB, FakeMachine, changed, reference

from dflash2.doctor.machine import Space
from dflash2.doctor.startup import startup_lines


def lines(tmp_path: Path, fake: FakeMachine, **memory: object) -> list[str]:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(reference(**memory)), encoding="utf-8")
    return startup_lines(file, fake.build(tmp_path / "root"))


def test_a_good_machine_says_nothing(tmp_path: Path) -> None:
    assert lines(tmp_path, GOOD) == []


def test_staging_of_1024_and_a_small_dev_shm_are_said_with_what_to_do(tmp_path: Path) -> None:
    """R-7.1 and R-7.6, before the first request."""
    small = changed(GOOD, space={"/dev/shm": Space(64 * MIB, 64 * MIB)})
    found = lines(tmp_path, small, staging_buffer_size_mb=1024)
    assert [line.partition(":")[0] for line in found] == ["shm-size", "staging-size"]
    assert "64 MiB" in found[0] and "write 512" in found[1]


def test_too_much_dram_is_said(tmp_path: Path) -> None:
    """R-7.5."""
    found = lines(tmp_path, GOOD, dram_capacity_mb=int(256 * 1024 * 0.9))
    assert any(line.startswith("dram-share: ") and "memory.dram_capacity_mb" in line for line in found)
