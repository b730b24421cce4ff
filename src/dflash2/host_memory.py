"""How much memory this process may use: the smallest cgroup limit above it, else what the machine has.

Sources: Linux kernel documentation, ``admin-guide/cgroup-v2.rst`` (``memory.max``, ``memory.high``) and
``admin-guide/cgroup-v1/memory.rst`` (``memory.limit_in_bytes``); ``proc_pid_cgroup(5)``.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from dflash2.errors import StorageError

_V2_FILES = ("memory.max", "memory.high")
_V1_FILES = ("memory.limit_in_bytes",)


@dataclass(frozen=True, slots=True)
class MemoryLimit:
    """The memory that this process may use.

    Attributes:
        num_bytes: the limit.
        source: where it was read, for log lines: ``physical memory`` or the cgroup file.
    """

    num_bytes: int
    source: str


def read_memory_limit(root: Path = Path("/")) -> MemoryLimit:
    """Read the limit that holds for this process.

    A cgroup may never use more than the groups above it, so every level up to the mount counts. Inside a container
    the path in ``/proc/self/cgroup`` may be the host's and not exist below the mount; the mount itself is then read.

    Args:
        root: where ``proc`` and ``sys`` are looked for.

    Raises:
        StorageError: ``/proc/meminfo`` does not say how much memory there is.
    """
    limits = [MemoryLimit(_physical_bytes(root), "physical memory"), *_cgroup_limits(root)]
    return min(limits, key=lambda limit: limit.num_bytes)


def _physical_bytes(root: Path) -> int:
    path = root / "proc/meminfo"
    try:
        lines = path.read_text(encoding="ascii").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise StorageError(f"cannot read the size of this machine's memory: {error}") from error
    for line in lines:
        fields = line.split()
        if len(fields) == 3 and fields[0] == "MemTotal:" and fields[1].isdigit() and fields[2] == "kB":
            return int(fields[1]) * 1024
    raise StorageError(f"{path} has no line MemTotal")


def _cgroup_limits(root: Path) -> list[MemoryLimit]:
    """Every limit on the way from this process's groups up to the mounts; empty where there are no cgroups."""
    try:
        lines = (root / "proc/self/cgroup").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []  # a kernel without cgroups sets no limit
    limits: list[MemoryLimit] = []
    for line in lines:
        _, controllers, group = [*line.split(":", 2), "", ""][:3]
        if controllers == "":
            limits += _limits_upwards(root / "sys/fs/cgroup", group, _V2_FILES)
        elif "memory" in controllers.split(","):
            limits += _limits_upwards(root / "sys/fs/cgroup/memory", group, _V1_FILES)
    return limits


def _limits_upwards(mount: Path, group: str, names: tuple[str, ...]) -> list[MemoryLimit]:
    relative = PurePosixPath(group.lstrip("/"))
    if ".." in relative.parts:  # a group outside this cgroup namespace
        relative = PurePosixPath()
    found = (_read_limit(mount / level / name) for level in (relative, *relative.parents) for name in names)
    return [limit for limit in found if limit is not None]


def _read_limit(path: Path) -> MemoryLimit | None:
    """The limit in one file; None where the file is absent or says ``max``."""
    try:
        text = path.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError):
        return None
    return MemoryLimit(int(text), f"cgroup {path.name}") if text.isdigit() else None
