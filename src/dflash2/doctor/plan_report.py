"""A plan in words, as JSON, and the configuration file with its reasons."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from dflash2.doctor.plan import PREFILL_EFFICIENCY, Plan
from dflash2.errors import StorageError
from dflash2.types import MIB

_GIB = 2**30


def describe(plan: Plan, weights_source: str) -> list[str]:
    """The plan, one line a fact. GiB are 2^30 bytes."""
    request = plan.request
    below = plan.total_sequences - plan.resident_sequences
    return [
        f"KV cache: {plan.bytes_per_token} bytes per token and rank in {request.shape.dtype}, "
        f"{plan.block_bytes} bytes per block of {request.block_size} tokens",
        f"weights: {request.weight_bytes / _GIB:.1f} GiB ({weights_source}), "
        f"{request.weight_bytes / request.ranks / _GIB:.1f} GiB on each of {request.ranks} devices",
        f"HBM for KV: {plan.hbm_blocks * plan.block_bytes / _GIB:.1f} GiB on each device, {plan.hbm_blocks} blocks, "
        f"{plan.hbm_blocks * request.block_size} tokens",
        f"a sequence of {request.context_tokens} tokens: {plan.sequence_blocks} blocks, "
        f"{plan.sequence_bytes / _GIB:.2f} GiB on each rank",
        f"resident in HBM at the same time: {plan.resident_sequences} of {request.concurrency} sequences",
        f"DRAM {plan.dram_bytes / _GIB:.1f} GiB{_proposed(request.dram_bytes)}: "
        f"{plan.dram_blocks // plan.sequence_blocks} more sequences",
        f"NVMe {plan.nvme_bytes / _GIB:.1f} GiB{_proposed(request.nvme_bytes)}: "
        f"{plan.nvme_blocks // plan.sequence_blocks} more sequences",
        f"together: {plan.total_sequences} sequences, {max(0, below)} of them waiting below HBM; {_verdict(plan)}",
        *_swap_lines(plan),
        *(f"note: {note}" for note in request.shape.notes),
    ]


def _proposed(given: int | None) -> str:
    return " (proposed)" if given is None else ""


def _verdict(plan: Plan) -> str:
    if not plan.resident_sequences:
        return "one sequence does not fit HBM, so it would be refused: more devices, a shorter context or fp8 KV"
    wanted = plan.request.concurrency
    return f"{wanted} are held" if plan.fits else f"{wanted} are not: give more DRAM or NVMe, or lower concurrency"


def _swap_lines(plan: Plan) -> list[str]:
    request, count = plan.request, plan.sequence_blocks
    from_dram = plan.dram_seconds(count, inwards=True)
    from_nvme = plan.nvme_seconds(count, inwards=True) + from_dram
    again = plan.recompute_seconds
    return [
        f"swap of one block: DRAM to HBM {_time(plan.dram_seconds(1, inwards=True))}, "
        f"back {_time(plan.dram_seconds(1, inwards=False))}",
        f"swap of one such sequence: DRAM to HBM {_time(from_dram)}, back "
        f"{_time(plan.dram_seconds(count, inwards=False))}; NVMe to HBM {_time(from_nvme)}, DRAM to NVMe "
        f"{_time(plan.nvme_seconds(count, inwards=False))}",
        f"computing it again: {_time(again)}, {_ratio(again, from_dram)} the swap from DRAM, "
        f"{_ratio(again, from_nvme)} that from NVMe",
        f"speeds: {request.speeds.source}",
        f"prefill: {prefill_source(plan)}",
    ]


def prefill_source(plan: Plan) -> str:
    """Where the time to recompute comes from."""
    request = plan.request
    if request.prefill_tokens_per_s is not None:
        return f"as given, {request.prefill_tokens_per_s:g} tokens/s of all ranks together"
    return f"assumed: {PREFILL_EFFICIENCY:.0%} of {request.tflops:g} TFLOPS on each device"


def _time(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1e3:.2f} ms"


def _ratio(numerator: float, denominator: float) -> str:
    return f"{numerator / denominator:.2g} times"


def reasons(plan: Plan, weights_source: str) -> list[tuple[str, str]]:
    """Key and reason, for every key that the configuration sets."""
    request = plan.request
    allowance = "as given" if request.activation_bytes is not None else "assumed"
    need = "what the sequences that do not fit above it need"
    return [
        (
            "memory.hbm_reserve_mb",
            f"{-(-request.weight_bytes // request.ranks) // MIB} MiB of weights ({weights_source}) and "
            f"{plan.activation_bytes // MIB} MiB for activations and CUDA ({allowance}); measure it and correct it",
        ),
        (
            "memory.dram_capacity_mb",
            _tier_reason(request.dram_bytes, plan.dram_bytes, f"{need}; check it with `dflash2 doctor`"),
        ),
        ("memory.nvme_capacity_mb", _tier_reason(request.nvme_bytes, plan.nvme_bytes, need)),
        (
            "memory.staging_buffer_size_mb",
            f"four batches of {plan.batch_blocks} blocks, the most that is in use at once, but not above the default",
        ),
        ("kv_block.block_size", "as asked" if request.block_size != 128 else "the default"),
        ("kv_block.prefetch_window", "starts narrow and widens by itself"),
        ("policy.cold_threshold", "the default; tune it on your own traffic only"),
        (
            "policy.swap_batch_size",
            "the default" if plan.batch_blocks == 32 else "smaller than the default, as HBM holds few blocks",
        ),
    ]


def _tier_reason(given: int | None, planned: int, need: str) -> str:
    if given is not None:
        return "as given"
    return need if planned else "not needed for this load; left out, the default holds"


def plan_json(plan: Plan, weights_source: str) -> dict[str, Any]:
    """All figures, in bytes, blocks and seconds."""
    request, count = plan.request, plan.sequence_blocks
    return {
        "format": 1,
        "bytes_per_token": plan.bytes_per_token,
        "block_bytes": plan.block_bytes,
        "kv_dtype": request.shape.dtype,
        "parameters": request.parameters.total,
        "weight_bytes": request.weight_bytes,
        "weights_source": weights_source,
        "hbm_blocks": plan.hbm_blocks,
        "dram_blocks": plan.dram_blocks,
        "nvme_blocks": plan.nvme_blocks,
        "dram_bytes": plan.dram_bytes,
        "nvme_bytes": plan.nvme_bytes,
        "sequence_blocks": count,
        "resident_sequences": plan.resident_sequences,
        "total_sequences": plan.total_sequences,
        "fits": plan.fits,
        "swap_in_dram_s": plan.dram_seconds(count, inwards=True),
        "swap_out_dram_s": plan.dram_seconds(count, inwards=False),
        "load_nvme_s": plan.nvme_seconds(count, inwards=True),
        "store_nvme_s": plan.nvme_seconds(count, inwards=False),
        "recompute_s": plan.recompute_seconds,
        "speeds_source": request.speeds.source,
        "prefill_source": prefill_source(plan),
        "notes": list(request.shape.notes),
        "config": plan.config().model_dump(exclude_none=True, exclude_unset=True),
        "reasons": dict(reasons(plan, weights_source)),
    }


def write_config(plan: Plan, weights_source: str, path: Path, *, force: bool) -> Path:
    """Write the configuration, and beside it a text with the plan and the reason for each key.

    JSON has no comments and the file is strict, so the reasons cannot be in it.

    Returns:
        Path of the text.

    Raises:
        StorageError: a file exists and ``force`` is not set, or cannot be written.
    """
    values = plan.config().model_dump(exclude_none=True, exclude_unset=True)
    lines = ["# Plan", "", *(f"- {line}" for line in describe(plan, weights_source)), "", "# Why each key", ""]
    lines += [f"- `{key}` = {_value(values, key)}: {reason}" for key, reason in reasons(plan, weights_source)]
    beside = path.with_name(f"{path.name}.reasons.md")
    _write(path, json.dumps(values, indent=2) + "\n", force)
    _write(beside, "\n".join(lines) + "\n", force)
    return beside


def _value(values: dict[str, Any], key: str) -> str:
    section, _, name = key.partition(".")
    return str(values[section].get(name, "left out"))


def _write(path: Path, text: str, force: bool) -> None:
    try:
        with path.open("w" if force else "x", encoding="utf-8") as stream:
            stream.write(text)
    except FileExistsError as error:
        raise StorageError(f"{path} exists; --force overwrites it") from error
    except OSError as error:
        raise StorageError(f"cannot write {path}: {error.strerror or error}") from error
