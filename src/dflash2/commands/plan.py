"""``dflash2 plan``: size the tiers for a model and a machine, and write the configuration that follows."""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING

from dflash2.commands.arguments import positive_float, positive_int

if TYPE_CHECKING:
    from dflash2.doctor.plan import PlanRequest

_GIB = 2**30


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add ``plan``."""
    parser = subparsers.add_parser(
        "plan",
        help="size the tiers for a model and write a configuration",
        description="All *-gb are GiB (2^30 bytes): 80 for a device sold as 80 GB. Nothing is downloaded. "
        "Exit code 0: the load is held; 1: it is not, or cannot be planned.",
    )
    parser.add_argument("model", metavar="MODEL", help="config.json, folder with one, or model id in the local cache")
    parser.add_argument("--gpu-memory-gb", type=positive_float, required=True, metavar="GB", help="of one device")
    parser.add_argument(
        "--gpus", "--ranks", type=positive_int, default=1, metavar="N", help="devices that share the model (1)"
    )
    parser.add_argument("--context", type=positive_int, metavar="TOKENS", help="of one sequence (the model's most)")
    parser.add_argument("--concurrency", type=positive_int, default=8, metavar="N", help="open sequences (8)")
    parser.add_argument("--dram-gb", type=_size, metavar="GB", help="for the machine (what is needed)")
    parser.add_argument("--nvme-gb", type=_size, metavar="GB", help="for the machine (what is needed)")
    parser.add_argument("--kv-dtype", choices=("auto", "bfloat16", "float16", "float32", "fp8"), default="auto")
    parser.add_argument("--block-size", type=positive_int, default=128, metavar="TOKENS", help="of a block (128)")
    parser.add_argument("--weights-gb", type=positive_float, metavar="GB", help="all weights (files, else estimated)")
    parser.add_argument("--activation-gb", type=_size, metavar="GB", help="on each device beside weights (assumed)")
    parser.add_argument("--profile", type=Path, metavar="FILE", help="speeds measured by `dflash2 doctor --probe`")
    parser.add_argument("--prefill-tokens-per-s", type=positive_float, metavar="N", help="measured, all ranks")
    parser.add_argument("--gpu-tflops", type=positive_float, metavar="N", help="peak of one device (312, A100)")
    parser.add_argument("--output", type=Path, metavar="FILE", help="write the configuration, and FILE.reasons.md")
    parser.add_argument("--force", action="store_true", help="overwrite the files if they exist")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Plan and print.

    Returns:
        0 if the concurrency asked for is held, else 1.

    Raises:
        ModelError: the model cannot be found or is not understood.
        CapacityError: the weights leave no room.
        ConfigError: the profile or a value for the configuration is not valid.
        StorageError: a file cannot be written.
    """
    from dflash2.doctor.plan import make_plan
    from dflash2.doctor.plan_report import describe, plan_json, write_config

    request, weights_source = _request(args)
    plan = make_plan(request)
    if args.json:
        print(json.dumps(plan_json(plan, weights_source), indent=2))
    else:
        print("\n".join(describe(plan, weights_source)))
    if args.output is not None:
        beside = write_config(plan, weights_source, args.output, force=args.force)
        if not args.json:
            print(f"wrote {args.output}, and the reason for each key to {beside}")
    return 0 if plan.fits else 1


def _request(args: argparse.Namespace) -> tuple[PlanRequest, str]:
    from dflash2.doctor.model_files import find_model
    from dflash2.doctor.model_shape import read_kv_shape
    from dflash2.doctor.parameters import count_parameters, weight_bytes
    from dflash2.doctor.plan import ASSUMED_SPEEDS, DEFAULT_TFLOPS, PlanRequest, speeds_of
    from dflash2.doctor.profile import read_profile
    from dflash2.errors import RequestError

    files = find_model(args.model, os.environ)
    shape, parameters = read_kv_shape(files.config, args.kv_dtype), count_parameters(files.config)
    weights, source = weight_bytes(files.config, parameters)
    if args.weights_gb is not None:
        weights, source = int(args.weights_gb * _GIB), "as given"
    elif files.weight_bytes is not None:
        weights, source = files.weight_bytes, "the size of its files"
    context = args.context or shape.max_context_tokens
    if not context:
        raise RequestError("the model does not say how long its context is; give --context")
    request = PlanRequest(
        shape=shape,
        parameters=parameters,
        weight_bytes=weights,
        device_bytes=int(args.gpu_memory_gb * _GIB),
        ranks=args.gpus,
        context_tokens=context,
        concurrency=args.concurrency,
        dram_bytes=_bytes(args.dram_gb),
        nvme_bytes=_bytes(args.nvme_gb),
        block_size=args.block_size,
        activation_bytes=_bytes(args.activation_gb),
        speeds=ASSUMED_SPEEDS if args.profile is None else speeds_of(read_profile(args.profile), str(args.profile)),
        prefill_tokens_per_s=args.prefill_tokens_per_s,
        tflops=args.gpu_tflops or DEFAULT_TFLOPS,
    )
    return request, source


def _bytes(gib: float | None) -> int | None:
    return None if gib is None else int(gib * _GIB)


def _size(text: str) -> float:
    value = float(text)
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError("must be a number of GiB, 0 or more")
    return value
