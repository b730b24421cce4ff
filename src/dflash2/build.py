"""Config to runtime: the only place that names concrete classes."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from pathlib import Path

from dflash2.cache.manager import CacheManager, CacheSettings
from dflash2.cache.rebalance import Rebalancer, Watermarks
from dflash2.cache.reservation import ReservationLedger, reservable_blocks
from dflash2.config import Config, EffectiveConfig, effective
from dflash2.errors import CapacityError, StorageError
from dflash2.monitoring.history import History
from dflash2.policy.adaptive import AdaptiveThreshold
from dflash2.policy.base import PlacementPolicy
from dflash2.policy.heat import HeatPolicy
from dflash2.policy.lru import LRUPolicy
from dflash2.policy.rebuild import RebuildCost
from dflash2.policy.saved import load_policy
from dflash2.pools.base import BlockPool
from dflash2.pools.dram import DramPool
from dflash2.pools.nvme import NvmeOptions, NvmePool
from dflash2.pools.nvme_files import check_folders
from dflash2.pools.nvme_leftovers import rank_folder, reclaim_dead_ranks
from dflash2.pools.tensor import LayerFirstPool, TensorPool, free_device_bytes, total_device_bytes
from dflash2.runtime import Runtime, RuntimeParts
from dflash2.table.keys import KeyNamespace
from dflash2.table.page_table import PageTable
from dflash2.transfer.base import TransferEngine
from dflash2.transfer.device_copy import HostAccess, create_copier, host_access
from dflash2.transfer.engine import ThreadedTransferEngine
from dflash2.transfer.inline import InlineTransferEngine
from dflash2.transfer.pacing import PacingOptions
from dflash2.transfer.staging import DEVICE_STAGING_BATCHES
from dflash2.types import MIB, KVLayout, Tier

logger = logging.getLogger(__name__)

FLOOR_BYTES, FLOOR_SHARE = 1 << 30, 0.02
"""Free space that the NVMe files leave on their file system: so many bytes, on a small one this share of it."""
CPU_POOL_SHARE = 8
"""Without ``hbm_capacity_mb`` the fast pool on a CPU gets one part in so many of what the process may use."""


def create_runtime(
    config: Config,
    layout: KVLayout,
    namespace: KeyNamespace,
    *,
    device: str = "cpu",
    world_size: int = 1,
    rank: int = 0,
    ranks_per_machine: int | None = None,
    engine_pool: LayerFirstPool | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> Runtime:
    """Take the memory of all tiers and put a runtime together, before or after the weights are loaded.

    Args:
        config: the file as read. Unless ``enable`` is true there are no tiers below HBM and the runtime says why.
        layout: shape of a block on this rank.
        namespace: what KV depends on besides the tokens.
        device: torch device of the fast pool; that of ``engine_pool`` where there is one.
        world_size: ranks of the model; DRAM and NVMe capacities are divided among them.
        rank: this one.
        ranks_per_machine: see ``dflash2.config.effective``.
        engine_pool: the fast pool of an engine that gives out its slots itself; the runtime mirrors which of them hold
            a block and keeps what lies below.
        clock: seconds; every decision uses it.

    Raises:
        ConfigError: the configuration does not fit this machine.
        CapacityError: a tier's memory cannot be had, or holds no block.
        StorageError: the NVMe path cannot be used or is too small.
    """
    resolved = effective(config, world_size, rank, ranks_per_machine=ranks_per_machine)
    fallback = None if config.enable else "enable is not true in the configuration"
    pools: dict[Tier, BlockPool] = {}
    if engine_pool is not None:
        device = engine_pool.device
    access = host_access(device)
    try:
        hbm = engine_pool or _fast_pool(resolved, layout, device)
        pools[Tier.HBM] = hbm
        if fallback is None:
            _add_lower_tiers(pools, resolved, layout, namespace, access)
        transfer = _transfer_engine(pools, resolved, layout, access)
    except BaseException:
        for pool in pools.values():
            pool.close()
        raise
    foreign = () if engine_pool is None else (Tier.HBM,)
    table = PageTable({tier: pool.num_slots for tier, pool in pools.items()}, foreign)
    settings = CacheSettings(
        layout.block_size, layout.block_bytes, config.policy.swap_batch_size, config.kv_block.prefetch_window
    )
    policy = make_policy(config, hbm.num_slots)
    policy_file = _policy_file(pools, resolved, world_size)
    if policy_file is not None:
        load_policy(policy, policy_file)
    cache = CacheManager(table, policy, transfer, settings, hbm.copy_within)
    _adopt(cache, pools.get(Tier.NVME))
    ledger = ReservationLedger(reservable_blocks(table, config.policy.swap_batch_size), hbm.num_slots)
    marks = Watermarks(config.policy.high_watermark, config.policy.low_watermark)
    guard = AdaptiveThreshold(config.policy.cold_threshold) if config.policy.adaptive else None
    tiers = [tier for tier in (Tier.HBM, Tier.DRAM) if tier not in foreign]
    rebalancer = Rebalancer(cache, marks, config.policy.refresh_interval_s, guard, tiers)
    hbm_tensor = hbm.tensor if isinstance(hbm, TensorPool) else None
    history = History(resolved.nvme_path / f"history-rank{resolved.rank}") if config.history_enabled else None
    parts = RuntimeParts(
        config, layout, hbm_tensor, pools, transfer, cache, ledger, rebalancer, fallback, history, device, policy_file
    )
    return Runtime(parts, namespace, clock)


def check_start(config: Config, world_size: int = 1, ranks: range = range(1)) -> None:
    """Refuse what can be refused before weights are loaded: memory that this machine has not, an NVMe path of no use.

    Args:
        config: as read.
        world_size: ranks of the model.
        ranks: those on this machine.

    Raises:
        ConfigError, StorageError: as ``create_runtime`` would later.
    """
    resolved = effective(config, world_size, ranks[0], ranks_per_machine=len(ranks))
    if config.enable and resolved.nvme_rank_bytes:
        paths = _nvme_folders(resolved)
        names = [rank_folder(rank) for rank in ranks]
        num_bytes = resolved.nvme_rank_bytes * len(ranks) // len(paths)
        for path in paths:
            check_folders(path, names, num_bytes, _floor_bytes(path))


def device_kv_bytes(config: Config, device: str, block_bytes: int) -> int | None:
    """How much of a device is for KV: all of it less reserve and staging, at most ``hbm_capacity_mb``.

    Weights belong to the reserve, whether they are loaded already or not.

    Args:
        config: as read.
        device: torch device.
        block_bytes: a block on this rank.

    Returns:
        None if the device has no memory of its own (CPU).

    Raises:
        CapacityError: reserve and staging leave nothing, or so much is not free.
    """
    total, free = total_device_bytes(device), free_device_bytes(device)
    if total is None or free is None:
        return None
    staging = DEVICE_STAGING_BATCHES * config.policy.swap_batch_size * block_bytes
    room = total - config.memory.hbm_reserve_mb * MIB - staging
    if config.memory.hbm_capacity_mb is not None:
        room = min(room, config.memory.hbm_capacity_mb * MIB)
    if room <= 0:
        raise CapacityError(
            f"memory.hbm_reserve_mb and {staging // MIB} MiB of device staging leave nothing of a device of "
            f"{total // MIB} MiB"
        )
    if room > free - staging:
        raise CapacityError(
            f"{room // MIB} MiB for KV and {staging // MIB} MiB of staging were asked for, but weights and others "
            f"hold all but {free // MIB} MiB of the device: raise memory.hbm_reserve_mb, or set memory.hbm_capacity_mb"
        )
    return room


def _fast_pool(resolved: EffectiveConfig, layout: KVLayout, device: str) -> TensorPool:
    available = device_kv_bytes(resolved.config, device, layout.block_bytes)
    if available is None:
        available = resolved.hbm_capacity_bytes or resolved.memory_limit.num_bytes // CPU_POOL_SHARE
    slots = available // layout.block_bytes
    if slots < 2:
        raise CapacityError(
            f"{available / 1e6:.0f} MB for KV on {device} hold fewer than 2 blocks of {layout.block_bytes / 1e6:.1f} "
            "MB; raise memory.hbm_capacity_mb, or lower memory.hbm_reserve_mb or kv_block.block_size"
        )
    copier = create_copier(device, resolved.config.policy.swap_batch_size, layout.block_bytes)
    return TensorPool(slots, layout, copier, device)


def _add_lower_tiers(
    pools: dict[Tier, BlockPool],
    resolved: EffectiveConfig,
    layout: KVLayout,
    namespace: KeyNamespace,
    access: HostAccess,
) -> None:
    dram_slots = resolved.dram_rank_bytes // layout.stride_bytes
    if dram_slots:
        pools[Tier.DRAM] = DramPool(dram_slots, layout, access.page_lock)
    nvme_slots = resolved.nvme_rank_bytes // layout.stride_bytes
    if nvme_slots:
        paths = _nvme_folders(resolved)
        options = NvmeOptions(free_space_floor_bytes=max(map(_floor_bytes, paths)))
        pools[Tier.NVME] = NvmePool(paths, rank_folder(resolved.rank), nvme_slots, layout, namespace.root(), options)


def _nvme_folders(resolved: EffectiveConfig) -> tuple[Path, ...]:
    """The NVMe paths, made where they were not there, without what ranks of an earlier run left."""
    key = "memory.nvme_path" if resolved.config.memory.nvme_paths is None else "memory.nvme_paths"
    for path in resolved.nvme_paths:
        try:
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise StorageError(f"{key}: {path} cannot be made ({error.strerror}); name a folder that can") from error
        reclaim_dead_ranks(path, resolved.world_size)
    return resolved.nvme_paths


def _floor_bytes(path: Path) -> int:
    """What stays free on the file system: logs, and whatever else lives there, must not fail because of a cache."""
    stats = os.statvfs(path)
    return min(FLOOR_BYTES, int(FLOOR_SHARE * stats.f_blocks * stats.f_frsize))


def _transfer_engine(
    pools: dict[Tier, BlockPool], resolved: EffectiveConfig, layout: KVLayout, access: HostAccess
) -> TransferEngine:
    if len(pools) == 1:
        return InlineTransferEngine({**pools, Tier.DRAM: DramPool(0, layout)})  # is never given a job
    return ThreadedTransferEngine(
        pools,
        resolved.staging_buffer_bytes,
        swap_batch_size=resolved.config.policy.swap_batch_size,
        copy_threads=access.copy_threads,
        page_lock=access.page_lock,
        pacing=PacingOptions(bytes_per_day=resolved.nvme_daily_write_bytes),
    )


def make_policy(config: Config, num_hbm_slots: int, rebuild: RebuildCost | None = None) -> PlacementPolicy:
    """See ``HeatPolicy``; without ``enable`` it is LRU."""
    if config.policy.eviction == "lru" or not config.enable:
        return LRUPolicy(num_hbm_slots)
    return HeatPolicy(num_hbm_slots, config.policy.cold_threshold, rebuild)


def _policy_file(pools: dict[Tier, BlockPool], resolved: EffectiveConfig, world_size: int) -> Path | None:
    """Where the policy is kept between two runs; with several ranks nowhere, for one that lost its file would decide
    otherwise than the others."""
    return resolved.nvme_path / "policy.json" if Tier.NVME in pools and world_size == 1 else None


def _adopt(cache: CacheManager, nvme: BlockPool | None) -> None:
    """Take over what an earlier run left on NVMe."""
    if isinstance(nvme, NvmePool):
        found = nvme.recover()
        cache.adopt(found.slots, found.keys)
        if len(found.slots):
            logger.info("%d blocks of an earlier run found on NVMe", len(found.slots))
