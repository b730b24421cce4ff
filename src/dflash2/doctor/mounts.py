"""Which file system and which disks are behind a path.

Sources: ``proc_pid_mountinfo(5)``; Linux kernel documentation, ``ABI/stable/sysfs-block``.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from dflash2.doctor.machine import Machine

MEMORY_FILE_SYSTEMS = frozenset({"tmpfs", "ramfs", "devtmpfs", "hugetlbfs"})
LAYERED_FILE_SYSTEMS = frozenset({"overlay", "aufs", "fuse-overlayfs", "fuse.fuse-overlayfs"})
NETWORK_FILE_SYSTEMS = frozenset(
    {"nfs", "nfs4", "cifs", "smb3", "ceph", "lustre", "glusterfs", "beegfs", "gpfs", "wekafs", "9p", "virtiofs", "afs"}
)
_MAX_DEPTH = 8
"""A stack of mapped and striped disks is never this deep."""


@dataclass(frozen=True, slots=True)
class Mount:
    """One line of ``mountinfo``.

    Attributes:
        point: where it is mounted.
        device: ``major:minor``.
        file_system: type, such as ``ext4``.
        source: what is mounted, such as ``/dev/nvme0n1p1``.
        read_only: nothing can be written.
    """

    point: Path
    device: str
    file_system: str
    source: str
    read_only: bool

    @property
    def is_network(self) -> bool:
        """Whether the bytes are on another machine; FUSE file systems that are not layers count as such."""
        name = self.file_system
        return name in NETWORK_FILE_SYSTEMS or (name.startswith("fuse.") and name not in LAYERED_FILE_SYSTEMS)


@dataclass(frozen=True, slots=True)
class Disk:
    """A disk as a whole.

    Attributes:
        name: such as ``nvme0n1``.
        rotational: it turns.
        transport: of an NVMe disk, such as ``pcie`` or ``tcp``; empty if it is not said.
    """

    name: str
    rotational: bool
    transport: str

    @property
    def is_virtual(self) -> bool:
        """A disk that a hypervisor offers; what it is really on cannot be seen, nor whether that turns."""
        return self.name.startswith(("vd", "xvd"))

    @property
    def is_nvme(self) -> bool:
        """Whether it speaks NVMe."""
        return self.name.startswith("nvme")


def find_mount(machine: Machine, path: Path) -> Mount | None:
    """The mount that holds an existing path; None where the kernel does not say."""
    best: Mount | None = None
    for line in (machine.read("/proc/self/mountinfo") or "").splitlines():
        mount = _parse(line)
        if mount is None or not path.is_relative_to(mount.point):
            continue
        # A later mount on the same point hides the earlier one.
        if best is None or len(mount.point.parts) >= len(best.point.parts):
            best = mount
    return best


def find_disks(machine: Machine, mount: Mount) -> list[Disk]:
    """The disks below a mount, through partitions, mappings and RAID; empty where the kernel does not say."""
    entry = machine.at(f"/sys/dev/block/{mount.device}")
    if not entry.exists() and mount.source.startswith("/dev/"):
        # btrfs and others mount under a device number of their own.
        entry = machine.at("/sys/class/block") / machine.at(mount.source).resolve().name
    return _disks_below(entry.resolve(), _MAX_DEPTH) if entry.exists() else []


def _disks_below(device: Path, depth: int) -> list[Disk]:
    if (device / "partition").exists():
        device = device.parent
    slaves = sorted((device / "slaves").iterdir()) if (device / "slaves").is_dir() else []
    if slaves and depth:
        return [disk for slave in slaves for disk in _disks_below(slave.resolve(), depth - 1)]
    return [Disk(device.name, _text(device / "queue/rotational") == "1", _text(device / "device/transport"))]


def _text(path: Path) -> str:
    return path.read_text(encoding="ascii", errors="replace").strip() if path.is_file() else ""


def _parse(line: str) -> Mount | None:
    left, separator, right = line.partition(" - ")
    head, tail = left.split(" "), right.split(" ")
    if not separator or len(head) < 6 or len(tail) < 2:
        return None
    read_only = "ro" in head[5].split(",") or (len(tail) > 2 and "ro" in tail[2].split(","))
    return Mount(Path(_unescaped(head[4])), head[2], tail[0], _unescaped(tail[1]), read_only)


def _unescaped(text: str) -> str:
    """The kernel writes blanks and backslashes as octal numbers."""
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), text)
