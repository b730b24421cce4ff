"""``dflash2 demo``: more context than HBM holds, with the same answers."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

MODEL_VARIABLE = "DFLASH2_DEMO_MODEL"


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the sub-command."""
    parser = subparsers.add_parser("demo", help="serve more context than the fast memory holds, and compare")
    parser.add_argument(
        "--model",
        default=os.environ.get(MODEL_VARIABLE),
        help=f"model folder, GGUF file or hub id (default: ${MODEL_VARIABLE})",
    )
    parser.add_argument("--chats", type=int, default=12, help="conversations at the same time (default: 12)")
    parser.add_argument("--turns", type=int, default=3, choices=(1, 2, 3, 4), help="questions in each (default: 3)")
    parser.add_argument(
        "--context-tokens", type=int, default=1472, help="length of each conversation at its end (default: 1472)"
    )
    parser.add_argument("--output-tokens", type=int, default=48, help="length of each answer (default: 48)")
    parser.add_argument("--nvme-path", type=Path, help="folder on the device to use as NVMe (default: temporary)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """0 if the answers are the same in all settings, 1 if not."""
    from dflash2.demo.run import run_demo
    from dflash2.demo.settings import DemoSize
    from dflash2.errors import RequestError

    if not args.model:
        raise RequestError(f"name a model: --model, or the environment variable {MODEL_VARIABLE}")
    size = DemoSize(args.chats, args.turns, args.context_tokens, args.output_tokens)
    return 0 if run_demo(args.model, size, args.json, args.nvme_path) else 1
