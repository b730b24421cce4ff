"""SMART figures and free space, over a fake /sys."""

from __future__ import annotations

import os
import struct
from pathlib import Path

import pytest

from dflash2.monitoring import disk_watch
from dflash2.monitoring.disk_watch import DiskWatch, parse_smart, read_smart


def fake_disk(root: Path, target: str, device: int) -> None:
    (root / "sys/devices" / target).mkdir(parents=True)
    (root / "dev").mkdir()
    links = root / "sys/dev/block"
    links.mkdir(parents=True)
    (links / f"{os.major(device)}:{os.minor(device)}").symlink_to(root / "sys/devices" / target)


def test_figures_of_a_log_page() -> None:
    log = bytearray(512)
    struct.pack_into("<BHBBB", log, 0, 4, 273 + 61, 90, 10, 37)
    log[48:64] = (2_000_000).to_bytes(16, "little")
    log[160:176] = (3).to_bytes(16, "little")
    assert parse_smart(bytes(log)) == {
        "critical_warning": 4,
        "temperature_celsius": 61,
        "spare_ratio": 0.9,
        "spare_limit_ratio": 0.1,
        "wear_ratio": 0.37,
        "written_bytes": 1_024_000_000_000,
        "media_errors": 3,
    }


@pytest.mark.parametrize("target", ["pci/nvme/nvme3/nvme3n1/nvme3n1p2", "virtual/nvme-subsystem/nvme3c0n1"])
def test_the_controller_behind_a_partition_is_asked(target: str, tmp_path: Path) -> None:
    fake_disk(tmp_path, target, os.makedev(259, 1))
    assert read_smart(os.makedev(259, 1), tmp_path) == {"unreadable": "/dev/nvme3: No such file or directory"}
    (tmp_path / "dev/nvme3").write_bytes(b"")
    assert "/dev/nvme3: " in read_smart(os.makedev(259, 1), tmp_path)["unreadable"]  # a file is no controller


def test_another_disk_has_nothing_to_say(tmp_path: Path) -> None:
    fake_disk(tmp_path, "pci/virtio/vda/vda1", os.makedev(254, 1))
    assert "not directly on an NVMe" in read_smart(os.makedev(254, 1), tmp_path)["unreadable"]


def test_smart_is_not_asked_for_every_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    monkeypatch.setattr(disk_watch, "read_smart", lambda device: asked.append(device) or {"wear_ratio": 0.1})
    now = [0.0]
    watch = DiskWatch(tmp_path, clock=lambda: now[0])
    first = watch.read()
    now[0] = disk_watch.INTERVAL_S - 1
    watch.read()
    assert len(asked) == 1 and first["smart"] == {"wear_ratio": 0.1} and 0 < first["free_bytes"] <= first["total_bytes"]
    now[0] = disk_watch.INTERVAL_S
    watch.read()
    assert len(asked) == 2
