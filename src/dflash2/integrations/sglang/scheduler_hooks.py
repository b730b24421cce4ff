"""Hooks in SGLang's scheduler process: what the linker's interface does not tell."""

from __future__ import annotations

import functools
from typing import Any

import torch

from dflash2.config import load_config
from dflash2.integrations.sglang import hookpoints, settings
from dflash2.integrations.sglang.build import Placement, being_made, made
from dflash2.integrations.sglang.nvme_waits import Wait
from dflash2.integrations.sglang.sizing import kv_budget_bytes
from dflash2.policy.base import Outcome

Original = Any


def register(registry: Any, kinds: Any) -> None:
    """Register all of them."""
    for point, hook in (
        (hookpoints.CREATE_CACHE, around_create_cache),
        (hookpoints.OFFLOAD_NODE, around_offload_node),
        (hookpoints.RELEASE_REQUEST, around_release_request),
        (hookpoints.CHECKPOINT, around_checkpoint),
        (hookpoints.EVICT, around_evict),
        (hookpoints.EVICT_LEAF, around_evict_leaf),
        (hookpoints.PROFILE_MEMORY, around_profile_memory),
        (hookpoints.QUEUE_REQUEST, around_queue_request),
        (hookpoints.ADD_ONE_REQ, around_add_one_req),
        (hookpoints.RELEASE_REQ, around_release_req),
        (hookpoints.RELEASE_KV, around_release_kv),
        (hookpoints.WEIGHTS_UPDATED, around_weights_updated),
        (hookpoints.WEIGHTS_FINISHED, around_weights_finished),
    ):
        registry.register(point.path, hook, kinds.AROUND)


def around_create_cache(original: Original, ctx: Any, **kwargs: Any) -> Any:
    """While the cache is made, the linker can ask which model and rank it serves."""
    from sglang.srt.runtime_context import get_parallel

    args = ctx.server_args
    runner = ctx.tp_worker.model_runner
    placement = Placement(
        model=runner.model,
        model_name=str(args.model_path),
        weight_version=str(args.weight_version),
        tp_rank=ctx.tp_rank,
        tp_size=ctx.tp_size,
        dp_rank=get_parallel().dp_rank or 0,
        dp_size=args.dp_size or 1,
        num_nodes=args.nnodes or 1,
        chunk_tokens=ctx.params.chunked_prefill_size or args.max_prefill_tokens or 8192,
    )
    token = being_made(placement)
    try:
        return original(ctx, **kwargs)
    finally:
        made(token)


def around_offload_node(original: Original, wrapper: Any, node_id: Any, transfers: Any) -> None:
    """Tell the linker what the node follows."""
    wrapper.cache_linker.parent_hashes = wrapper.cache.get_prefix_hash_values(node_id)
    original(wrapper, node_id, transfers)


def around_release_request(original: Original, wrapper: Any, rid: str) -> None:
    """An aborted request waits for nothing any more."""
    original(wrapper, rid)
    linker = linker_of(wrapper.cache)
    if linker is not None:
        linker.ended(rid, None)


def around_profile_memory(original: Original, configurator: Any, pre_model_load_memory: Any) -> int:
    """The device pool: the device's memory less reserve and staging, at most ``hbm_capacity_mb``."""
    path = settings.configured_path()
    found: int = original(configurator, pre_model_load_memory)
    if path is None:
        return found
    from sglang.srt.runtime_context import get_schedule

    token_bytes = _token_bytes(configurator)
    return kv_budget_bytes(load_config(path), configurator.device, found, token_bytes, get_schedule().page_size)


def around_checkpoint(original: Original, cache: Any, req: Any, **kwargs: Any) -> None:
    """While a request's KV goes into the tree, the linker can ask whose it is."""
    linker = linker_of(cache)
    if linker is None:
        original(cache, req, **kwargs)
        return
    linker.inserting = req.rid
    try:
        original(cache, req, **kwargs)
    finally:
        linker.inserting = None


def around_evict(original: Original, cache: Any, params: Any, targets: Any = None, **kwargs: Any) -> Any:
    """Room on the device: hot leaves are passed over, unless there is not enough without them."""
    linker = linker_of(cache)
    if linker is None or kwargs.get("allocation_reclaim_satisfied") is not None:
        return original(cache, params, targets, **kwargs)
    with linker.sparing_hot_leaves() as spared:
        result = original(cache, params, targets, **kwargs)
    missing = params.num_tokens - result.num_tokens_evicted
    if targets is not None:
        missing = max((wanted - cache._component_available_size(kind) for kind, wanted in targets.values()), default=0)
    if spared() and missing > 0:
        rest = original(cache, type(params)(num_tokens=missing), targets, **kwargs)
        result.num_tokens_evicted += rest.num_tokens_evicted
    return result


def around_evict_leaf(original: Original, cache: Any, node_id: Any, tracker: Any) -> Any:
    """See ``around_evict``."""
    linker = linker_of(cache)
    if linker is not None and linker.device_heat.spares(cache.get_last_hash_value(node_id)):
        return None
    return original(cache, node_id, tracker)


def around_queue_request(original: Original, scheduler: Any, req: Any, *args: Any, **kwargs: Any) -> None:
    """At arrival: the policy is told, what the request will need from NVMe starts for DRAM, and it takes its place."""
    linker = linker_of(scheduler.tree_cache)
    if linker is None or req.to_finish is not None:
        original(scheduler, req, *args, **kwargs)
        return
    from sglang.srt.mem_cache.common import _req_radix_key

    linker.waiting_rids = functools.partial(_waiting_rids, scheduler)
    if not req.retracted_stain:
        key = _req_radix_key(scheduler.tree_cache, req, req.origin_input_ids)
        linker.arrived(req.rid, req.session_id, key)
    num_missing = None if req.session is not None else _missing_tokens(scheduler.tree_cache, req, linker)
    original(scheduler, req, *args, **kwargs)
    queue = scheduler.waiting_queue
    if num_missing is not None and _first_come_first_served(scheduler) and queue and queue[-1] is req:
        queue.pop()
        queue.insert(linker.order.join([other.rid for other in queue], req.rid, num_missing), req)


def _waiting_rids(scheduler: Any) -> list[str]:
    return [req.rid for req in scheduler.waiting_queue]


def _missing_tokens(tree_cache: Any, req: Any, linker: Any) -> int:
    """What has to be computed of a request, the same on all ranks. On the way its blocks start for DRAM."""
    from sglang.srt.mem_cache.base_prefix_cache import MatchPrefixParams
    from sglang.srt.mem_cache.common import _req_radix_key

    key = _req_radix_key(tree_cache, req, req.origin_input_ids + req.output_ids)
    found = tree_cache.match_prefix(MatchPrefixParams(key=key, req=req))
    below = least(tree_cache, linker.num_expected_tokens(req.rid))
    return int(len(key) - found.device_prefix_len - below)


def _first_come_first_served(scheduler: Any) -> bool:
    """The user has not asked SGLang for an order of its own."""
    return not scheduler.enable_priority_scheduling and scheduler.policy.policy.value == "fcfs"


def around_add_one_req(original: Original, adder: Any, req: Any, *args: Any, **kwargs: Any) -> Any:
    """A request whose blocks are still on their way holds up those behind it for a moment, and is passed over then."""
    from sglang.srt.managers.schedule_policy import AddReqResult

    linker = linker_of(adder.tree_cache)
    if linker is None:
        return original(adder, req, *args, **kwargs)
    nobody_runs = not adder.can_run_list and not adder.running_batch.reqs
    wait = most(adder.tree_cache, linker.nvme_waits.of(req.rid)) if linker.has_nvme else Wait.NOT
    if wait != Wait.NOT:
        if nobody_runs:
            linker.let_copies_run()
        return AddReqResult.OTHER if wait == Wait.HOLDS else AddReqResult.CONTINUE
    promised = linker.promises.try_give(
        req.rid,
        len(req.origin_input_ids),
        req.sampling_params.max_new_tokens,
        len(req.output_ids),
        req.lora_id,
        functools.partial(agreed, adder.tree_cache),
        nobody_runs=nobody_runs,
    )
    if not promised:  # where nobody runs, retracted requests behind it have what it needs, and must go on
        return AddReqResult.CONTINUE if nobody_runs else AddReqResult.OTHER
    num_before = len(adder.can_run_list)
    result = original(adder, req, *args, **kwargs)
    if len(adder.can_run_list) > num_before:
        linker.admitted(req.rid, _device_hashes(adder.tree_cache, req), len(req.full_untruncated_fill_ids))
    elif not req.retracted_stain:  # a retracted request keeps its promise while it waits
        linker.promises.take_back(req.rid)
    return result


def around_release_req(original: Original, **kwargs: Any) -> bool:
    """A retraction: the request's KV goes into the tree, and from there below, instead of being lost."""
    linker = linker_of(kwargs["tree_cache"])
    if linker is None:
        return bool(original(**kwargs))
    linker.note_retraction(kwargs["req"].rid)
    linker.retracting = True
    try:
        return bool(original(**kwargs))
    finally:
        linker.retracting = False


def around_release_kv(original: Original, req: Any, tree_cache: Any, *, checkpoint: bool) -> None:
    """See ``around_release_req``."""
    linker = linker_of(tree_cache)
    retracted = linker is not None and linker.retracting and not req.finished() and req.to_finish is None
    original(req, tree_cache, checkpoint=checkpoint or retracted)
    if linker is not None and not retracted:
        linker.ended(req.rid, outcome_of(req))


def around_weights_updated(original: Original, updater: Any, recv_req: Any, *args: Any, **kwargs: Any) -> Any:
    """New weights: what the old ones computed must not be found any more, whether SGLang flushes or not."""
    _weights_changed(updater)  # first: a flush then renews the keys from the weights that are there
    return original(updater, recv_req, *args, **kwargs)


def around_weights_finished(original: Original, updater: Any, recv_req: Any) -> Any:
    """The end of an update in pieces, or of one that SGLang did not see (RDMA)."""
    result = original(updater, recv_req)
    _weights_changed(updater)
    return result


def _weights_changed(updater: Any) -> None:
    linker = None if updater.scheduler is None else linker_of(updater.scheduler.tree_cache)
    if linker is not None:
        linker.weights_changed()


def linker_of(tree_cache: Any) -> Any:
    """The linker behind SGLang's cache, or None if it has none of ours."""
    from dflash2.integrations.sglang.linker import DFlash2Linker

    wrapper = getattr(tree_cache, "linker", None)
    linker = None if wrapper is None else wrapper.cache_linker
    return linker if isinstance(linker, DFlash2Linker) else None


def outcome_of(req: Any) -> Outcome | None:
    """How a request ended; None if it was aborted."""
    reason = None if req.finished_reason is None else req.finished_reason.to_json().get("type")
    return None if reason in (None, "abort") else Outcome(reason, len(req.output_ids))


def agreed(tree_cache: Any, here: bool) -> bool:
    """True on all ranks if it is true on one. Every rank must ask."""
    return most(tree_cache, int(here)) > 0


def most(tree_cache: Any, here: int) -> int:
    """The largest of what the ranks give. Every rank must ask."""
    return _reduced(tree_cache, here, torch.distributed.ReduceOp.MAX)


def least(tree_cache: Any, here: int) -> int:
    """The smallest of what the ranks give. Every rank must ask."""
    return _reduced(tree_cache, here, torch.distributed.ReduceOp.MIN)


def _reduced(tree_cache: Any, here: int, operation: Any) -> int:
    if tree_cache.tp_world_size == 1:
        return here
    value = torch.tensor([here], dtype=torch.int)
    tree_cache._all_reduce_attn_groups(value, operation)
    return int(value.item())


def _device_hashes(tree_cache: Any, req: Any) -> list[str]:
    """Hashes of the pages that the request found on the device."""
    core = tree_cache.tree_core
    num_pages = (req.prefix_len - req.host_loaded_length) // tree_cache.page_size
    if req.last_node is None or num_pages <= 0:
        return []
    hashes = [*core.get_prefix_hash_values(req.last_node), *core.get_hash_values(req.last_node)]
    return hashes[:num_pages]


def _token_bytes(configurator: Any) -> int:
    """KV of one token on this rank; the layouts for which this is not all of it are refused when the pool is there."""
    from sglang.srt.runtime_context import get_parallel

    model = configurator.model_config
    heads = model.get_num_kv_heads(get_parallel().attn_tp_size)
    return int(
        heads * (model.head_dim + model.v_head_dim) * model.num_hidden_layers * configurator.kv_cache_dtype.itemsize
    )
