"""Statistics of routes, staging and host memory."""

from __future__ import annotations

from pathlib import Path

from dflash2.monitoring.data_path import ROUTES, host_stats, nvme_stats, transfer_stats
from dflash2.transfer.stats import RouteStats, TransferSnapshot
from dflash2.types import Tier

KIB = 1024


class Measuring:
    is_pressed = True

    def stats(self) -> TransferSnapshot:
        routes = {(Tier.DRAM, Tier.HBM): RouteStats(num_jobs=2, num_blocks=7, num_bytes=70, latency_sum_s=0.5)}
        return TransferSnapshot(routes, {"staging timeout": 3}, 100, 40, 60)


def test_every_route_is_there_before_anything_moved() -> None:
    stats = transfer_stats(object())
    assert set(stats["routes"]) == set(ROUTES) and len(ROUTES) == 6
    assert not any(value for route in stats["routes"].values() for value in route.values())
    assert set(stats["failures"].values()) == {0} and stats["pressed"] is False


def test_what_was_measured() -> None:
    stats = transfer_stats(Measuring())
    assert stats["routes"]["dram_to_hbm"]["blocks"] == 7 and stats["routes"]["hbm_to_dram"]["blocks"] == 0
    assert stats["failures"]["staging_timeout"] == 3
    assert (stats["staging_bytes"], stats["staging_in_use_bytes"], stats["staging_peak_bytes"]) == (100, 40, 60)
    assert stats["pressed"] is True


def test_without_nvme_there_is_nothing_to_say() -> None:
    assert nvme_stats(None) == {}


def host(root: Path, current: int | None = None) -> dict[str, int]:
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/meminfo").write_text("MemTotal: 1000 kB\nMemAvailable: 600 kB\n")
    (root / "proc/self/cgroup").write_text("0::/box\n")
    if current is not None:
        group = root / "sys/fs/cgroup/box"
        group.mkdir(parents=True)
        (group / "memory.max").write_text(f"{400 * KIB}\n")
        (group / "memory.current").write_text(f"{current}\n")
        (group / "memory.stat").write_text(f"anon 1\ninactive_file {10 * KIB}\nactive_file {20 * KIB}\n")
    return host_stats(root)


def test_headroom_on_a_whole_machine(tmp_path: Path) -> None:
    assert host(tmp_path) == {"memory_limit_bytes": 1000 * KIB, "headroom_bytes": 600 * KIB, "shm_bytes": 0}


def test_headroom_in_a_container_is_what_its_limit_leaves(tmp_path: Path) -> None:
    assert host(tmp_path, current=330 * KIB) == {
        "memory_limit_bytes": 400 * KIB,
        "headroom_bytes": 100 * KIB,
        "shm_bytes": 0,
    }


def test_a_machine_without_proc(tmp_path: Path) -> None:
    assert host_stats(tmp_path) == {}
