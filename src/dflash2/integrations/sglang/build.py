"""The keeper of one SGLang rank: layout from its KV pool, identity from its weights, tiers from the configuration."""

from __future__ import annotations

import logging
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

from dflash2.build import create_runtime
from dflash2.config import Config, effective, load_config
from dflash2.engine.fingerprint import model_fingerprint
from dflash2.errors import DFlash2Error
from dflash2.integrations.sglang.clock import TurnoverClock
from dflash2.integrations.sglang.errors import refuse
from dflash2.integrations.sglang.keeper import Keeper
from dflash2.integrations.sglang.keys import PageKeys
from dflash2.pools.tensor import LayerFirstPool
from dflash2.table.keys import KeyNamespace
from dflash2.transfer.device_copy import create_copier
from dflash2.types import DTYPE_BYTES, KVLayout, Tier

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Placement:
    """Where in the deployment this rank is, and what it serves.

    Attributes:
        model: the loaded module.
        model_name: as the user named it.
        weight_version: ``--weight-version``.
        tp_rank, tp_size: tensor-parallel rank.
        dp_rank, dp_size: replica.
        num_nodes: machines.
        chunk_tokens: most tokens that one step may compute.
    """

    model: Any
    model_name: str
    weight_version: str
    tp_rank: int
    tp_size: int
    dp_rank: int
    dp_size: int
    num_nodes: int
    chunk_tokens: int

    @property
    def rank(self) -> int:
        """Among all ranks of all replicas."""
        return self.dp_rank * self.tp_size + self.tp_rank

    @property
    def world_size(self) -> int:
        """Ranks of all replicas."""
        return self.tp_size * self.dp_size

    @property
    def ranks_per_machine(self) -> int:
        """Those that share DRAM and disk with this one."""
        return max(1, self.world_size // self.num_nodes)

    @staticmethod
    def current() -> Placement:
        """Of the cache that is being made; set by the hook around its construction."""
        return _placement.get()


_placement: ContextVar[Placement] = ContextVar("dflash2_placement")


def being_made(placement: Placement) -> Any:
    """Set what ``Placement.current`` returns; give the token to ``made``."""
    return _placement.set(placement)


def made(token: Any) -> None:
    """Undo ``being_made``."""
    _placement.reset(token)


def build_keeper(
    params: Any, components: Any, path: str, placement: Placement, forward_stream: Any
) -> tuple[Keeper, PageKeys]:
    """Take DRAM and NVMe and mirror SGLang's pool; ends the process with a message where that is not possible."""
    try:
        config = load_config(path)
        pool = _mirror_pool(params, components, config, forward_stream)
        namespace = KeyNamespace(
            model=placement.model_name,
            weights_version=placement.weight_version,
            dtype=pool.layout.dtype,
            block_size=pool.layout.block_size,
            rank=placement.tp_rank,
            world_size=placement.tp_size,
        )
        keys = PageKeys(namespace, lambda: model_fingerprint(placement.model))
        clock = TurnoverClock(pool.num_slots)
        for line in effective(
            config, placement.world_size, placement.rank, ranks_per_machine=placement.ranks_per_machine
        ).describe():
            logger.info("DFlash2: %s", line)
        runtime = create_runtime(
            config,
            pool.layout,
            keys.namespace,
            world_size=placement.world_size,
            rank=placement.rank,
            ranks_per_machine=placement.ranks_per_machine,
            engine_pool=pool,
            clock=clock,
        )
        if runtime.cache.table.capacity(Tier.NVME) and runtime.cache.table.capacity(Tier.DRAM) < _fewest(config):
            refuse("memory.dram_capacity_mb is too small: blocks come from NVMe through DRAM")
    except DFlash2Error as error:
        refuse(str(error))
    margin = 2 * -(-placement.chunk_tokens // pool.layout.block_size)
    return Keeper(runtime, clock, margin), keys


def _fewest(config: Config) -> int:
    return 2 * int(config.policy.swap_batch_size)


def _mirror_pool(params: Any, components: Any, config: Config, forward_stream: Any) -> LayerFirstPool:
    pool = params.token_to_kv_pool_allocator.get_kvcache()
    names = {component.name for component in components}
    if type(pool) is not MHATokenToKVPool or names != {"FULL"}:
        refuse(
            f"the KV layout of this model is not supported ({type(pool).__name__}, {', '.join(sorted(names))}); "
            "supported is plain attention with one K and one V per head (MHA, GQA)"
        )
    if pool.kv_cache_layout != "nhd" or pool.head_dim != pool.v_head_dim or pool.k_scale_buffer is not None:
        refuse(f"the KV cache layout {pool.kv_cache_layout} or its quantisation scales are not supported")
    dtype = str(pool.store_dtype).removeprefix("torch.")
    if dtype not in DTYPE_BYTES:
        refuse(f"KV of type {dtype} is not supported")
    layout = KVLayout(pool.layer_num, pool.head_num, pool.head_dim, params.page_size, dtype)
    copier = create_copier(str(pool.device), config.policy.swap_batch_size, layout.block_bytes, forward_stream)
    return LayerFirstPool(pool.k_buffer, pool.v_buffer, layout, copier)
