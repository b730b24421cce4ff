"""Every place of SGLang that this plug-in hooks or reads, with the signature it was written against.

SGLang's internals move from release to release. ``check`` names what moved, so that a new release fails with one
sentence at start instead of a cache that quietly does nothing.
"""

from __future__ import annotations

import inspect
import pkgutil
from collections.abc import Iterable
from dataclasses import dataclass

TESTED_VERSIONS = ("0.5.23",)


@dataclass(frozen=True, slots=True)
class HookPoint:
    """A function of SGLang.

    Attributes:
        path: dotted path.
        parameters: names that must be among its parameters, in this order.
        why: what the plug-in does there.
    """

    path: str
    parameters: tuple[str, ...]
    why: str


_ARGS = "sglang.srt.server_args.ServerArgs"
_MEM = "sglang.srt.mem_cache"
_WRAPPER = f"{_MEM}.unified_cache.unified_cache_linker.UnifiedCacheLinkerWrapper"
_LINKER = f"{_MEM}.unified_cache.unified_cache_linker.UnifiedCacheLinker"

ADD_CLI_ARGS = HookPoint(f"{_ARGS}.add_cli_args", ("parser",), "adds --dflash2-config")
FROM_CLI_ARGS = HookPoint(f"{_ARGS}.from_cli_args", ("cls", "args"), "reads --dflash2-config")
RESOLVE_ONCE = HookPoint(f"{_ARGS}.resolve_once", ("self",), "maps the configuration to server arguments")

CREATE_CACHE = HookPoint(
    f"{_MEM}.registry.create_unified_radix_cache", ("ctx", "cache_class"), "learns model and rank of the cache"
)
OFFLOAD_NODE = HookPoint(f"{_WRAPPER}._offload_node", ("self", "node_id", "transfers"), "learns what a block follows")
RELEASE_REQUEST = HookPoint(f"{_WRAPPER}.release_request", ("self", "rid"), "forgets an aborted request")
CHECKPOINT = HookPoint(
    f"{_MEM}.unified_radix_cache.UnifiedRadixCache.checkpoint", ("self", "req", "up_to"), "whose blocks these are"
)
EVICT = HookPoint(
    f"{_MEM}.unified_radix_cache.UnifiedRadixCache._evict", ("self", "params", "available_size_targets"), "heat"
)
EVICT_LEAF = HookPoint(
    f"{_MEM}.unified_radix_cache.UnifiedRadixCache._evict_device_leaf", ("self", "node_id", "tracker"), "heat"
)
PROFILE_MEMORY = HookPoint(
    f"{_MEM}.kv_cache_configurator.KVCacheConfigurator._profile_available_bytes",
    ("self", "pre_model_load_memory"),
    "sizes the device pool",
)
QUEUE_REQUEST = HookPoint(
    "sglang.srt.managers.scheduler.Scheduler._add_request_to_queue", ("self", "req"), "prefetches at arrival"
)
ADD_ONE_REQ = HookPoint("sglang.srt.managers.schedule_policy.PrefillAdder.add_one_req", ("self", "req"), "admission")
RELEASE_REQ = HookPoint(
    "sglang.srt.managers.schedule_batch.release_req", ("req", "tree_cache"), "keeps the KV of a retracted request"
)
RELEASE_KV = HookPoint(
    f"{_MEM}.common.release_kv_cache", ("req", "tree_cache", "checkpoint"), "keeps the KV of a retracted request"
)

_UPDATER = "sglang.srt.managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager"
WEIGHTS_UPDATED = HookPoint(
    f"{_UPDATER}.flush_cache_after_weight_update", ("self", "recv_req", "success"), "notices new weights"
)
WEIGHTS_FINISHED = HookPoint(f"{_UPDATER}.end_weight_update", ("self", "recv_req"), "notices new weights")

IN_FRONT_END = (ADD_CLI_ARGS, FROM_CLI_ARGS, RESOLVE_ONCE)
IN_SCHEDULER = (
    CREATE_CACHE,
    OFFLOAD_NODE,
    RELEASE_REQUEST,
    CHECKPOINT,
    EVICT,
    EVICT_LEAF,
    PROFILE_MEMORY,
    QUEUE_REQUEST,
    ADD_ONE_REQ,
    RELEASE_REQ,
    RELEASE_KV,
    WEIGHTS_UPDATED,
    WEIGHTS_FINISHED,
)
READ_ONLY = (
    HookPoint(f"{_MEM}.allocator.paged.PagedTokenToKVPoolAllocator._release_page_ids", ("self", "page_ids"), "frees"),
    HookPoint(f"{_LINKER}.lookup", ("self", "rid", "transfers"), "linker"),
    HookPoint(f"{_LINKER}.load", ("self", "rid", "transfers"), "linker"),
    HookPoint(f"{_LINKER}.start_layer_wise_loading", ("self",), "linker"),
    HookPoint(f"{_LINKER}.finish_layer_wise_loading", ("self", "counter_index"), "linker"),
    HookPoint(f"{_LINKER}.offload", ("self", "transfers", "session_id"), "linker"),
    HookPoint(f"{_LINKER}.num_completed_offloads", ("self",), "linker: once a step"),
    HookPoint(f"{_LINKER}.pop_completed_offload", ("self",), "linker"),
    HookPoint(f"{_MEM}.unified_radix_cache.UnifiedRadixCache.get_last_hash_value", ("self", "node_id"), "heat"),
    HookPoint(f"{_MEM}.unified_radix_cache.UnifiedRadixCache._component_available_size", ("self",), "heat"),
    HookPoint(f"{_MEM}.unified_radix_cache.UnifiedRadixCache.get_prefix_hash_values", ("self", "node_id"), "parents"),
    HookPoint(f"{_MEM}.unified_radix_cache.UnifiedRadixCache._all_reduce_attn_groups", ("self", "tensor", "op"), "TP"),
    HookPoint(f"{_MEM}.unified_radix_cache.UnifiedRadixCache.match_prefix", ("self", "params"), "arrival"),
    HookPoint("sglang.srt.runtime_context.get_parallel", (), "rank"),
    HookPoint("sglang.srt.runtime_context.get_schedule", (), "page size"),
    HookPoint(
        "sglang.srt.configs.model_config.ModelConfig.get_num_kv_heads", ("self", "tensor_parallel_size"), "sizes"
    ),
    HookPoint(f"{_MEM}.utils.get_storage_hash_str", ("key", "prior_hash", "page_size"), "arrival"),
    HookPoint(f"{_MEM}.common._req_radix_key", ("tree_cache", "req", "token_ids"), "arrival"),
    HookPoint(
        "sglang.srt.managers.schedule_policy.SchedulePolicy.calc_priority",
        ("self", "waiting_queue"),
        "order of the queue",
    ),
    HookPoint(
        "sglang.srt.managers.schedule_policy.PrefillAdder.__init__", ("self", "running_batch"), "whether anything runs"
    ),
)
"""Not hooked, but relied upon."""


def moved(points: Iterable[HookPoint]) -> list[str]:
    """One sentence for each point that is not what it was; imports the modules."""
    problems = []
    for point in points:
        try:
            target = pkgutil.resolve_name(point.path)
        except (ImportError, AttributeError) as error:
            problems.append(f"{point.path} is gone ({error}); needed: {point.why}")
            continue
        found = [name for name in inspect.signature(inspect.unwrap(target)).parameters if name in point.parameters]
        wanted = [name for name in point.parameters if name not in ("self", "cls")]
        if [name for name in found if name not in ("self", "cls")] != wanted:
            signature = inspect.signature(inspect.unwrap(target))
            problems.append(f"{point.path} now takes {signature}, not {', '.join(wanted)}; needed: {point.why}")
    return problems
