"""Statistics of what moves bytes and of what is below: routes between tiers, staging, NVMe files, host memory."""

from __future__ import annotations

import os
from collections.abc import Mapping
from itertools import permutations
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from dflash2.errors import StorageError
from dflash2.host_memory import read_memory_limit
from dflash2.pools.nvme import NvmePool
from dflash2.pools.nvme_io import PoolHealth
from dflash2.transfer.stats import RouteStats, TransferSnapshot
from dflash2.types import Tier

ROUTES = tuple(f"{src.label}_to_{dst.label}" for src, dst in permutations(Tier, 2))
FAILURES = ("source", "destination", "staging timeout", "cancelled", "endurance budget")
"""Why a block did not arrive."""


@runtime_checkable
class Measured(Protocol):
    """A transfer engine that counts what it does."""

    @property
    def is_pressed(self) -> bool:
        """NVMe takes stores much slower than it can."""
        ...

    def stats(self) -> TransferSnapshot:
        """Counters now; from any thread."""
        ...


def transfer_stats(transfer: object) -> dict[str, Any]:
    """Routes by ``{source}_to_{destination}``, all routes from and to NVMe together, failures by reason, staging.

    Zeros where nothing is measured.
    """
    snapshot = transfer.stats() if isinstance(transfer, Measured) else TransferSnapshot({}, {}, 0, 0, 0)
    routes = {f"{src.label}_to_{dst.label}": stats for (src, dst), stats in snapshot.routes.items()}
    return {
        "routes": {name: _route(routes.get(name, RouteStats())) for name in ROUTES},
        "nvme_loads": _sum([stats for (src, _), stats in snapshot.routes.items() if src is Tier.NVME]),
        "nvme_stores": _sum([stats for (_, dst), stats in snapshot.routes.items() if dst is Tier.NVME]),
        "failures": {reason.replace(" ", "_"): snapshot.failures.get(reason, 0) for reason in FAILURES},
        "staging_bytes": snapshot.staging_bytes,
        "staging_in_use_bytes": snapshot.staging_in_use_bytes,
        "staging_peak_bytes": snapshot.staging_peak_bytes,
        "pressed": isinstance(transfer, Measured) and transfer.is_pressed,
    }


def _route(stats: RouteStats) -> dict[str, float]:
    return {
        "jobs": stats.num_jobs,
        "blocks": stats.num_blocks,
        "bytes": stats.num_bytes,
        "failed_blocks": stats.num_failed,
        "queued_blocks": stats.queued_blocks,
        "busy_s": stats.busy_s,
        "latency_sum_s": stats.latency_sum_s,
        "latency_max_s": stats.latency_max_s,
    }


def _sum(every: list[RouteStats]) -> dict[str, float]:
    return {
        "jobs": sum(stats.num_jobs for stats in every),
        "queued_blocks": sum(stats.queued_blocks for stats in every),
        "latency_sum_s": sum(stats.latency_sum_s for stats in every),
        "latency_max_s": max((stats.latency_max_s for stats in every), default=0.0),
    }


def nvme_stats(pool: object) -> dict[str, Any]:
    """Health of the NVMe tier as its loads and stores see it, without touching the disk; empty where there is none."""
    if not isinstance(pool, NvmePool):
        return {}
    return {
        "healthy": pool.health is PoolHealth.OK,
        "io_mode": pool.io_mode,
        "checksum_failures": pool.checksum_failures,
        "quarantined_slots": pool.num_quarantined,
        "faults": dict(pool.fault_counts),
    }


def host_stats(root: Path = Path("/")) -> dict[str, int]:
    """What this process may use of the machine's memory, and how much of that is left.

    ``headroom_bytes`` is the smaller of what the kernel can give (``MemAvailable``) and what the cgroup leaves, its
    page cache counted as free. Without a readable ``/proc`` the result is empty.
    """
    try:
        limit = read_memory_limit(root)
    except StorageError:
        return {}
    headroom = _meminfo_bytes(root, "MemAvailable")
    used = _cgroup_used_bytes(root)
    if used is not None:
        headroom = min(headroom, max(0, limit.num_bytes - used))
    return {"memory_limit_bytes": limit.num_bytes, "headroom_bytes": headroom, "shm_bytes": _shm_bytes(root)}


def _shm_bytes(root: Path) -> int:
    try:
        space = os.statvfs(root / "dev/shm")
    except OSError:
        return 0
    return space.f_blocks * space.f_frsize


def _meminfo_bytes(root: Path, name: str) -> int:
    for line in (root / "proc/meminfo").read_text(encoding="ascii").splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    return 0


def _cgroup_used_bytes(root: Path) -> int | None:
    """Memory charged to this process's cgroup (v2) less its file cache; None where that cannot be read."""
    try:
        groups = (root / "proc/self/cgroup").read_text(encoding="utf-8").splitlines()
        group = next(line.split("::", 1)[1] for line in groups if line.startswith("0::"))
    except (OSError, StopIteration):
        return None
    mount = root / "sys/fs/cgroup"
    for folder in (mount / group.lstrip("/"), mount):
        try:
            current = int((folder / "memory.current").read_text(encoding="ascii"))
            stat = (folder / "memory.stat").read_text(encoding="ascii").splitlines()
        except (OSError, ValueError):
            continue
        cache: Mapping[str, int] = {key: int(value) for key, value in (line.split() for line in stat)}
        return current - cache.get("inactive_file", 0) - cache.get("active_file", 0)
    return None
