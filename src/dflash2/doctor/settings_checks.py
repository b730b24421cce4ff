"""The configuration itself: the file, tier sizes, staging, window and threshold (R-7.1, R-7.4)."""

from __future__ import annotations

from dflash2.config.schema import MemoryConfig
from dflash2.doctor.case import Case
from dflash2.doctor.findings import Finding, error, gib, ok, warn
from dflash2.transfer.staging import STAGING_BATCHES
from dflash2.types import MIB

STAGING_SLACK = 2
HIGH_THRESHOLD = 0.95
LOW_THRESHOLD = 0.05
WIDEST_WINDOW = 8
_DEFAULT_STAGING_MB: int = MemoryConfig().staging_buffer_size_mb


def check_config(case: Case) -> Finding:
    """The file can be read and is valid."""
    reading = case.reading
    if reading.problem:
        return error(reading.problem, "correct the file; `dflash2 config check` lists every problem")
    if not reading.source:
        return ok("no --config: the defaults are examined")
    if not reading.config.enable:
        return warn(
            f"{reading.source} is valid, but enable is not true",
            "an engine would run unchanged; write true to switch on",
        )
    return ok(f"{reading.source} is valid")


def check_tier_sizes(case: Case) -> Finding:
    """What the sizes of the tiers mean together."""
    dram, nvme, hbm = case.dram_bytes, case.nvme_bytes, _hbm_bytes(case)
    below = f"DRAM {gib(dram)}, NVMe {gib(nvme)}"
    if dram == 0 and nvme == 0:
        return warn("there is no tier below HBM", "set memory.dram_capacity_mb; without it nothing can be swapped")
    if hbm is None:
        return ok(f"{below}; the size of HBM for KV is not known here")
    found = f"HBM for KV {gib(hbm)}, {below}: {gib(hbm + dram + nvme)} together, as a block counts on one tier only"
    if dram >= hbm:
        return ok(found)
    rest = "go to NVMe" if nvme else "stay in HBM and new requests wait"
    return ok(
        f"{found}. DRAM is smaller than HBM, which is supported: at most {gib(dram)} of KV wait in DRAM at a time, "
        f"blocks beyond that {rest}"
    )


def check_staging(case: Case) -> Finding:
    """Staging is not larger than it can be used."""
    memory, batch = case.config.memory, case.config.policy.swap_batch_size
    size = memory.staging_buffer_size_mb
    if case.block_bytes is None:
        if size >= 2 * _DEFAULT_STAGING_MB:
            return warn(
                f"memory.staging_buffer_size_mb is {size}, {size / _DEFAULT_STAGING_MB:g} times the default",
                f"a larger buffer raises the peak of memory, not the speed: write {_DEFAULT_STAGING_MB}, or name the "
                "model with --model to compare it with what can be used",
            )
        return ok(f"staging is at most {size} MiB per device")
    usable = -(-STAGING_BATCHES * batch * case.block_bytes // MIB)
    found = (
        f"staging is at most {size} MiB per device; {STAGING_BATCHES} batches of {batch} blocks, the most that is in "
        f"use at once, are {usable} MiB"
    )
    remedy = f"write {usable} in memory.staging_buffer_size_mb"
    if size * MIB < case.block_bytes:
        return error(found, f"it does not hold one block: {remedy}")
    if size < STAGING_SLACK * usable:
        return ok(found)
    # The default is a bound for large models and harmless for small ones.
    return warn(found, remedy) if size > _DEFAULT_STAGING_MB else ok(found, f"{remedy} to have a tighter bound")


def check_window(case: Case) -> Finding:
    """The window starts narrow; it widens by itself."""
    window = case.config.kv_block.prefetch_window
    if window >= WIDEST_WINDOW:
        return warn(
            f"kv_block.prefetch_window is {window}, the widest there is",
            "write 4: it widens to 8 by itself while prefetches are used and HBM has room",
        )
    return ok(f"the prefetch window starts at {window} blocks")


def check_threshold(case: Case) -> Finding:
    """The threshold parts hot from cold."""
    policy = case.config.policy
    value = policy.cold_threshold
    if policy.eviction == "lru":
        return ok("policy.eviction is lru, which knows no threshold")
    if value >= HIGH_THRESHOLD:
        guard = "the adaptive guard will have to correct it" if policy.adaptive else "and policy.adaptive is off"
        return warn(
            f"policy.cold_threshold is {value}: almost every block counts as cold, {guard}",
            "write 0.8; at 0.99 blocks leave that are needed at once, and the disk saturates",
        )
    if value <= LOW_THRESHOLD:
        return warn(
            f"policy.cold_threshold is {value}: almost no block counts as cold, so nothing leaves HBM ahead of need",
            "write 0.8",
        )
    return ok(f"blocks below a heat of {value} count as cold")


def _hbm_bytes(case: Case) -> int | None:
    """HBM for KV of all ranks; None where it depends on what the engine chooses."""
    cap = case.config.memory.hbm_capacity_mb
    if case.devices.devices:
        room = min(case.kv_bytes(device) for device in case.devices.devices)
        return max(0, min(room, room if cap is None else cap * MIB)) * case.ranks
    return None if cap is None else cap * MIB * case.ranks
