"""Host memory: DRAM against the limit (R-6.3, R-7.5), shared memory and page locks (R-6.4, R-7.6)."""

from __future__ import annotations

from pathlib import Path

from dflash2.doctor.case import Case
from dflash2.doctor.findings import Finding, error, gib, ok, skipped, warn
from dflash2.types import MIB

MAX_DRAM_SHARE = 0.8
MIN_SHM_BYTES = 1024 * MIB
"""What NCCL and the engines' worker processes ask of /dev/shm; Docker gives 64 MiB unless told."""
_CAP_IPC_LOCK = 1 << 14
_CONTAINER_FILES = ("/.dockerenv", "/run/.containerenv")
_CONTAINER_WORDS = ("docker", "kubepods", "containerd", "libpod", "lxc")


def check_dram_share(case: Case) -> Finding:
    """DRAM asked is at most 80 % of what this process may use."""
    limit, asked = case.memory_limit, case.dram_bytes
    found = f"{gib(asked)} asked of {gib(limit.num_bytes)} ({limit.source}), {asked / limit.num_bytes:.0%}"
    most = int(limit.num_bytes * MAX_DRAM_SHARE) // MIB
    if asked + case.staging_bytes > limit.num_bytes:
        return error(
            f"{found}; beside it {gib(case.staging_bytes)} of staging",
            f"the start will fail: lower memory.dram_capacity_mb, to {most} at most, or raise the limit",
        )
    if asked > limit.num_bytes * MAX_DRAM_SHARE:
        return warn(found, f"lower memory.dram_capacity_mb to {most}: page cache, weights and the engine need the rest")
    return ok(found)


def check_dram_available(case: Case) -> Finding:
    """As much memory as is asked is free at this moment."""
    available = available_bytes(case)
    if available is None:
        return skipped("the kernel does not say how much memory is available")
    asked = case.dram_bytes + case.staging_bytes
    found = f"{gib(asked)} asked with staging, {gib(available)} available on the machine"
    if asked > available:
        return warn(found, "other processes hold the memory: end them, or lower memory.dram_capacity_mb")
    return ok(found)


def check_shm(case: Case) -> Finding:
    """``/dev/shm`` is large enough for the engine; this project needs none of it."""
    container = is_container(case)
    place = "in a container" if container else "on the machine itself"
    if not case.machine.exists("/dev/shm"):
        return warn(f"there is no /dev/shm ({place})", "NCCL and worker processes need it: mount a tmpfs there")
    size = case.machine.space(Path("/dev/shm")).total_bytes
    found = f"/dev/shm has {gib(size)} ({place}); DFlash2 itself needs none"
    if size >= MIN_SHM_BYTES:
        return ok(found)
    how = "start the container with --shm-size=8g, or an emptyDir of medium Memory at /dev/shm in Kubernetes"
    return warn(found, f"NCCL and the engine's workers need more: {how if container else 'remount it larger'}")


def check_memlock(case: Case) -> Finding:
    """Page-locked host memory for the device may be as large as what is asked."""
    if not case.devices.devices:
        return skipped("no device is visible here, so no memory is page-locked")
    if _may_lock_all(case):
        return ok("this process may lock memory without a limit (CAP_IPC_LOCK)")
    limit = _memlock_bytes(case)
    if limit is None:
        return ok("memlock is unlimited")
    asked = case.dram_bytes + case.staging_bytes
    found = f"memlock is {gib(limit)}, {gib(asked)} are asked"
    if asked > limit:
        return warn(
            found,
            "page-locking may be refused, and the start with it: `ulimit -l unlimited`, LimitMEMLOCK=infinity in the "
            "systemd unit, or --ulimit memlock=-1 for the container",
        )
    return ok(found)


def is_container(case: Case) -> bool:
    """Whether this process runs in a container, as far as its traces tell."""
    machine = case.machine
    if any(machine.exists(name) for name in _CONTAINER_FILES):
        return True
    if "container" in machine.environ or "KUBERNETES_SERVICE_HOST" in machine.environ:
        return True
    groups = (machine.read("/proc/1/cgroup") or "") + (machine.read("/proc/self/cgroup") or "")
    return any(word in groups for word in _CONTAINER_WORDS)


def available_bytes(case: Case) -> int | None:
    """Memory of the whole machine that is free or can be freed at once; None if the kernel does not say."""
    for line in (case.machine.read("/proc/meminfo") or "").splitlines():
        fields = line.split()
        if len(fields) == 3 and fields[0] == "MemAvailable:" and fields[1].isdigit():
            return int(fields[1]) * 1024
    return None


def _may_lock_all(case: Case) -> bool:
    for line in (case.machine.read("/proc/self/status") or "").splitlines():
        name, _, value = line.partition(":")
        if name == "CapEff":
            return bool(int(value.strip(), 16) & _CAP_IPC_LOCK)
    return False


def _memlock_bytes(case: Case) -> int | None:
    """The soft limit; None if there is none."""
    for line in (case.machine.read("/proc/self/limits") or "").splitlines():
        if line.startswith("Max locked memory"):
            soft = line.removeprefix("Max locked memory").split()[0]
            return int(soft) if soft.isdigit() else None
    return None
