"""The memory limit of this process, read from made-up ``proc`` and ``sys`` trees."""

from __future__ import annotations

from pathlib import Path

import pytest

from dflash2.errors import StorageError
from dflash2.host_memory import MemoryLimit, read_memory_limit

PHYSICAL = MemoryLimit(64_000_000 * 1024, "physical memory")


def tree(root: Path, files: dict[str, str], meminfo: str = "MemTotal:       64000000 kB\n") -> Path:
    for name, text in {"proc/meminfo": f"{meminfo}MemFree: 1 kB\n", **files}.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text, encoding="utf-8")
    return root


def test_without_cgroups_the_machine_is_the_limit(tmp_path: Path) -> None:
    assert read_memory_limit(tree(tmp_path, {})) == PHYSICAL


def test_v2_smallest_level_counts(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "0::/a/b\n",
        "sys/fs/cgroup/a/b/memory.max": "max\n",
        "sys/fs/cgroup/a/memory.max": "4096000\n",
        "sys/fs/cgroup/memory.max": "8192000\n",
    }
    assert read_memory_limit(tree(tmp_path, files)) == MemoryLimit(4096000, "cgroup memory.max")


def test_v2_high_counts_too(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "0::/a\n",
        "sys/fs/cgroup/a/memory.max": "8192000\n",
        "sys/fs/cgroup/a/memory.high": "4096\n",
    }
    assert read_memory_limit(tree(tmp_path, files)) == MemoryLimit(4096, "cgroup memory.high")


@pytest.mark.parametrize("group", ["/docker/0123", "/../../outside", "/"])
def test_container_where_only_the_mount_exists(tmp_path: Path, group: str) -> None:
    files = {"proc/self/cgroup": f"0::{group}\n", "sys/fs/cgroup/memory.max": "777\n", "sys/outside/memory.max": "5\n"}
    assert read_memory_limit(tree(tmp_path, files)).num_bytes == 777


def test_v1(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "5:cpu,cpuacct:/x\n4:memory:/a/b:c\n0::/\n",
        "sys/fs/cgroup/memory/a/b:c/memory.limit_in_bytes": "4096\n",
        "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
    }
    assert read_memory_limit(tree(tmp_path, files)) == MemoryLimit(4096, "cgroup memory.limit_in_bytes")


def test_v1_unlimited_is_the_machine(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "4:memory:/\n",
        "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
    }
    assert read_memory_limit(tree(tmp_path, files)) == PHYSICAL


def test_a_line_that_is_no_cgroup_is_passed_over(tmp_path: Path) -> None:
    assert read_memory_limit(tree(tmp_path, {"proc/self/cgroup": "nonsense\n\n"})) == PHYSICAL


def test_without_a_size_of_memory_there_is_no_guess(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="MemTotal"):
        read_memory_limit(tree(tmp_path, {}, meminfo=""))
    (tmp_path / "proc/meminfo").unlink()
    with pytest.raises(StorageError, match="cannot read"):
        read_memory_limit(tmp_path)


def test_this_machine() -> None:
    assert read_memory_limit().num_bytes > 1 << 20
