"""The ``dflash2`` command: finds the sub-command, runs it, turns errors into one line and an exit code.

Exit codes: 0 done; 1 a DFlash2 error; 2 a wrong configuration file or command line; 130 interrupted.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Protocol

from dflash2 import __version__
from dflash2.commands import bench, blocks, config, demo, doctor, plan, replay, serve, top, tune
from dflash2.errors import ConfigError, DFlash2Error

_NAME_NOTE = (
    "The name also belongs to a speculative-decoding drafter in other projects (SGLang's DFLASH, the package dflash); "
    "DFlash2 has nothing to do with it."
)


class Command(Protocol):
    """What a module of ``dflash2.commands`` offers. It imports what is heavy only inside ``run``."""

    def add_parser(self, subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
        """Add the sub-command's parser and set its default ``run``, a ``(args) -> exit code``."""
        ...


COMMANDS: tuple[Command, ...] = (serve, demo, bench, replay, tune, top, blocks, doctor, plan, config)
"""In the order in which ``--help`` lists them. A new sub-command is its module, named here."""


def build_parser() -> argparse.ArgumentParser:
    """The whole command line."""
    parser = argparse.ArgumentParser(
        prog="dflash2",
        description="One runtime for the memory of LLM inference: KV-cache blocks over HBM, DRAM and NVMe.",
        epilog=_NAME_NOTE,
    )
    parser.add_argument("--version", action="version", version=f"dflash2 {__version__}")
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
    subparsers = parser.add_subparsers(metavar="COMMAND", required=True)
    for command in COMMANDS:
        command.add_parser(subparsers)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code.

    Args:
        argv: arguments without the program's name; by default those of the process.

    Raises:
        SystemExit: from argparse, after ``--help``, ``--version`` (0) or a wrong command line (2).
        DFlash2Error: only with ``--debug``.
    """
    args = build_parser().parse_args(argv)
    try:
        return int(args.run(args))
    except DFlash2Error as error:
        if args.debug:
            raise
        print(f"dflash2: error: {error}", file=sys.stderr)
        return 2 if isinstance(error, ConfigError) else 1
    except KeyboardInterrupt:
        print("dflash2: interrupted", file=sys.stderr)
        return 130
