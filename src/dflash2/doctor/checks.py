"""Every check by its id, and running them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

from dflash2.doctor import (
    device_checks,
    host_checks,
    leftover_checks,
    settings_checks,
    software_checks,
    storage_checks,
)
from dflash2.doctor.case import Case
from dflash2.doctor.findings import EXIT_CODES, Finding, skipped

Check: TypeAlias = Callable[[Case], Finding]

CHECKS: Mapping[str, Check] = {
    "config-file": settings_checks.check_config,
    "paths-absolute": storage_checks.check_paths,
    "driver-version": software_checks.check_driver,
    "devices-readable": software_checks.check_devices_readable,
    "cuda-version": software_checks.check_cuda,
    "pytorch-version": software_checks.check_pytorch,
    "native-copier": software_checks.check_native_copier,
    "hbm-budget": device_checks.check_hbm_budget,
    "device-processes": device_checks.check_device_processes,
    "device-numa-node": device_checks.check_device_numa,
    "dram-share": host_checks.check_dram_share,
    "dram-available": host_checks.check_dram_available,
    "shm-size": host_checks.check_shm,
    "memlock-limit": host_checks.check_memlock,
    "nvme-device": storage_checks.check_nvme_device,
    "nvme-direct-io": storage_checks.check_direct_io,
    "nvme-space": storage_checks.check_nvme_space,
    "tier-sizes": settings_checks.check_tier_sizes,
    "staging-size": settings_checks.check_staging,
    "prefetch-window": settings_checks.check_window,
    "cold-threshold": settings_checks.check_threshold,
    "allocator-segments": device_checks.check_allocator_segments,
    "allocator-caching": device_checks.check_allocator_caching,
    "first-generation-variables": leftover_checks.check_old_variables,
    "first-generation-shared-memory": leftover_checks.check_old_shared_memory,
}
"""In the order of the report. The ids are stable: scripts may look for them."""

NEED_CONFIG = frozenset(
    {
        "paths-absolute",
        "hbm-budget",
        "device-processes",
        "dram-share",
        "dram-available",
        "memlock-limit",
        "nvme-device",
        "nvme-direct-io",
        "nvme-space",
        "tier-sizes",
        "staging-size",
        "prefetch-window",
        "cold-threshold",
    }
)
"""Checks that say nothing of use while the file is not valid."""


@dataclass(frozen=True, slots=True)
class CheckResult:
    """A finding under the id of its check."""

    id: str
    finding: Finding


def run_checks(case: Case) -> list[CheckResult]:
    """All checks, in the order of ``CHECKS``."""
    return [CheckResult(name, _run(name, check, case)) for name, check in CHECKS.items()]


def _run(name: str, check: Check, case: Case) -> Finding:
    if case.reading.problem and name in NEED_CONFIG:
        return skipped("the configuration file is not valid")
    return check(case)


def exit_code(results: list[CheckResult]) -> int:
    """0: all well; 1: a warning; 2: an error."""
    return max((EXIT_CODES[result.finding.status] for result in results), default=0)
