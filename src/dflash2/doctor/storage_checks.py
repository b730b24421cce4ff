"""The NVMe tier: what its paths are on, direct I/O, space (R-6.2), and that paths are absolute (R-7.7)."""

from __future__ import annotations

from pathlib import Path

from dflash2.doctor.case import Case
from dflash2.doctor.findings import Finding, error, gib, ok, skipped, warn, worst
from dflash2.doctor.machine import DirectIO
from dflash2.doctor.mounts import LAYERED_FILE_SYSTEMS, MEMORY_FILE_SYSTEMS, Disk, Mount, find_disks, find_mount

NO_NVME = "no NVMe tier is asked for (memory.nvme_capacity_mb is 0)"
_OTHER_PATH = "set memory.nvme_path to a folder on a local NVMe disk"


def check_paths(case: Case) -> Finding:
    """The folder for NVMe files is absolute. A relative one in the file is already refused by ``check_config``."""
    cache = case.machine.environ.get("XDG_CACHE_HOME", "")
    written = case.config.memory.nvme_path or case.config.memory.nvme_paths
    if written is None and cache and not cache.startswith("/"):
        return warn(
            f"XDG_CACHE_HOME={cache} is relative and therefore ignored; NVMe files go to {case.nvme_path}",
            "write an absolute path there, or set memory.nvme_path",
        )
    return ok(f"NVMe files go to {', '.join(map(str, case.nvme_paths))}")


def check_nvme_device(case: Case) -> Finding:
    """The paths are on local NVMe disks, each on its own."""
    if not case.nvme_bytes:
        return skipped(NO_NVME)
    return worst([*(_check_device(case, path) for path in case.nvme_paths), *_shared_disks(case)])


def _shared_disks(case: Case) -> list[Finding]:
    mounts = [find_mount(case.machine, case.machine.nearest_existing(path)) for path in case.nvme_paths]
    sources = [mount.source for mount in mounts if mount is not None]
    twice = sorted({source for source in sources if sources.count(source) > 1})
    if not twice:
        return []
    return [warn(f"several of memory.nvme_paths are on {', '.join(twice)}", "name one folder on each disk")]


def _check_device(case: Case, path: Path) -> Finding:
    mount = find_mount(case.machine, case.machine.nearest_existing(path))
    if mount is None:
        return warn(f"the kernel does not say what {path} is on", "make sure that it is a local NVMe disk")
    where = f"{path} is on {mount.file_system} ({mount.source}, mounted at {mount.point})"
    if mount.file_system in MEMORY_FILE_SYSTEMS:
        return error(f"{where}, which is memory", f"blocks would only move from DRAM to DRAM: {_OTHER_PATH}")
    if mount.read_only:
        return error(f"{where}, which is read-only", _OTHER_PATH)
    if mount.file_system in LAYERED_FILE_SYSTEMS:
        return warn(
            f"{where}, the container's own layer", f"mount a host folder on NVMe into the container, then {_OTHER_PATH}"
        )
    if mount.is_network:
        return warn(f"{where}, which is another machine's", f"every swap would cross the network: {_OTHER_PATH}")
    return _judge_disks(path, mount, find_disks(case.machine, mount))


def _judge_disks(path: Path, mount: Mount, disks: list[Disk]) -> Finding:
    if not disks:
        return warn(f"the disk behind {path} ({mount.file_system}, {mount.source}) cannot be told", _OTHER_PATH)
    names = ", ".join(sorted({disk.name for disk in disks}))
    others = [disk for disk in disks if not disk.is_nvme]
    remote = [disk for disk in disks if disk.is_nvme and disk.transport not in ("", "pcie", "apple-nvme")]
    if any(disk.rotational and not disk.is_virtual for disk in others):
        return warn(f"{path} is on {names}, a disk that turns", f"a swap would take very long: {_OTHER_PATH}")
    if others:
        return warn(
            f"{path} is on {names}, not an NVMe device by its name",
            f"measure it with `dflash2 doctor --probe`; if it is slow, {_OTHER_PATH}",
        )
    if remote:
        return warn(f"{path} is on {names}, NVMe over {remote[0].transport}", f"it shares the network: {_OTHER_PATH}")
    return ok(f"{path} is on {names} ({mount.file_system})")


def check_direct_io(case: Case) -> Finding:
    """Files there can be written, and with O_DIRECT."""
    if not case.nvme_bytes:
        return skipped(NO_NVME)
    return worst([_try_direct_io(case, path) for path in case.nvme_paths])


def _try_direct_io(case: Case, path: Path) -> Finding:
    folder = case.machine.nearest_existing(path)
    trial = case.machine.try_direct_io(folder)
    if trial.outcome is DirectIO.NOT_WRITABLE:
        return error(f"{folder} cannot be written: {trial.reason}", "give this user the folder, or name another one")
    if trial.outcome is DirectIO.REFUSED:
        return warn(
            f"{folder} does not take O_DIRECT: {trial.reason}",
            "buffered I/O is used, which is slower and takes page cache; ext4 and XFS on a local disk take it",
        )
    return ok(f"O_DIRECT works in {folder}")


def check_nvme_space(case: Case) -> Finding:
    """Free space and our own files there are at least twice what is asked."""
    if not case.nvme_bytes:
        return skipped(NO_NVME)
    return worst([_check_space(case, path) for path in case.nvme_paths])


def _check_space(case: Case, path: Path) -> Finding:
    asked = case.nvme_bytes // len(case.nvme_paths)
    folder = case.machine.nearest_existing(path)
    try:
        free = case.machine.space(folder).free_bytes
    except OSError as failure:
        return error(f"the space at {folder} cannot be read: {failure.strerror}", _OTHER_PATH)
    own = _own_bytes(case, path)
    found = f"{gib(asked)} asked at {folder}: {gib(free)} free" + (f" and {gib(own)} in our own files" if own else "")
    if free + own < asked:
        return error(found, "the start will fail: lower memory.nvme_capacity_mb, free space, or choose another path")
    if free + own < 2 * asked:
        return warn(found, "less than twice what is asked: a nearly full disk writes slowly; leave it more room")
    return ok(found)


def _own_bytes(case: Case, path: Path) -> int:
    """What the pools of earlier starts hold below the path; they are used again."""
    total = 0
    folder = case.machine.at(path)
    for name in ("data", "index"):
        for file in folder.glob(f"rank*/{name}"):
            total += file.stat().st_blocks * 512
    return total
