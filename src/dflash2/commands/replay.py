"""``dflash2 replay``: what policies would have done with recorded traffic."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING

from dflash2.commands.arguments import positive_int

if TYPE_CHECKING:
    from dflash2.config import Config
    from dflash2.replay.device import DeviceModel

DEFAULT_BYTES_PER_TOKEN = 20_480
"""A model of 72B parameters on eight devices, as in ``DeviceModel``: 80 layers, K and V, one of 8 heads, 128 values of
one byte."""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add ``replay``."""
    parser = subparsers.add_parser(
        "replay",
        help="run recorded traffic through the real cache, without a model",
        description="Reads Mooncake and agent traces (.jsonl, .gz), recordings of `dflash2 serve --record`, Azure's "
        "CSV files (lengths only), and - for a stream. For a single tier the policies are heat, the classical lru, "
        "fifo, lfu, s3-fifo, arc and w-tinylfu (each also with -tail: a request's last block is touched first) and "
        "opt, which knows the future; for several tiers heat, lru, write-through (LRU that writes "
        "everything to NVMe) and clairvoyant (as few writes as give its hits).",
    )
    parser.add_argument("trace", metavar="TRACE", help="a file, or - for the standard input")
    parser.add_argument("--policy", default="heat,lru", metavar="NAME,…", help="default heat,lru")
    sizes = parser.add_mutually_exclusive_group(required=True)
    sizes.add_argument(
        "--capacity-blocks",
        metavar="N,…",
        help="blocks of one tier; several tiers as HBM/DRAM/NVME, such as 2000/20000/100000",
    )
    sizes.add_argument("--config", type=Path, metavar="FILE", help="all tiers and settings of a dflash2_config.json")
    parser.add_argument(
        "--bytes-per-token",
        type=positive_int,
        metavar="N",
        help=f"KV of one token on one rank, to count bytes (default {DEFAULT_BYTES_PER_TOKEN}: 72B in FP8 on 8 GPUs)",
    )
    parser.add_argument(
        "--ranks", type=positive_int, default=1, metavar="N", help="that share the DRAM and NVMe of --config (1)"
    )
    parser.add_argument(
        "--device-profile", type=Path, metavar="FILE", help="speeds, for a modelled TTFT; from `dflash2 doctor --probe`"
    )
    parser.add_argument("--upto", type=positive_int, metavar="N", help="report the first N requests only")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw hit ratios and how true heat is (.png, .svg)")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Replay and print.

    Raises:
        TraceError: the trace cannot be read.
        ConfigError: configuration or profile are wrong.
        RequestError: a policy is not known.
        StorageError: the plot cannot be written.
    """
    from rich.console import Console

    from dflash2.replay.device import read_device_model
    from dflash2.replay.plots import check_plotting, plot_results
    from dflash2.replay.report import print_report, report_json
    from dflash2.replay.session import ReplayPlan, run_plan
    from dflash2.replay.sizes import parse_capacity

    if args.plot is not None:
        check_plotting()
    device = None if args.device_profile is None else read_device_model(args.device_profile)
    config = _config(args.config)
    plan = ReplayPlan(
        trace=args.trace,
        policies=tuple(args.policy.split(",")),
        capacities=tuple(parse_capacity(text) for text in (args.capacity_blocks or "").split(",") if text),
        config=config,
        ranks=args.ranks,
        bytes_per_token=args.bytes_per_token or bytes_per_token(device, config),
        device=device,
        upto=args.upto,
    )
    results = run_plan(plan, Console(stderr=True))
    if args.json:
        print(json.dumps(report_json(args.trace, results), indent=2))
    else:
        print_report(results, Console())
    if args.plot is not None:
        plot_results(results, args.plot)
    return 0


def _config(path: Path | None) -> Config:
    from dflash2.config import Config, load_config

    return Config() if path is None else load_config(path)


def bytes_per_token(device: DeviceModel | None, config: Config) -> int:
    """KV of one token on one rank, where the command line does not say."""
    if device is None or device.block_bytes is None:
        return DEFAULT_BYTES_PER_TOKEN
    return max(1, device.block_bytes // config.kv_block.block_size)
