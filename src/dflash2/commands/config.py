"""``dflash2 config``: write a first configuration file, check one, or make one from old environment variables."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from dflash2.commands.arguments import positive_int
from dflash2.errors import DFlash2Error

DEFAULT_NAME = "dflash2_config.json"


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add ``config`` with its own sub-commands ``init``, ``check`` and ``migrate``."""
    parser = subparsers.add_parser("config", help="write, check or migrate a configuration file")
    actions = parser.add_subparsers(metavar="ACTION", required=True)

    init = actions.add_parser("init", help="write a configuration file with the defaults for this machine")
    init.add_argument("path", nargs="?", type=Path, default=Path(DEFAULT_NAME), metavar="PATH", help=DEFAULT_NAME)
    init.add_argument("--force", action="store_true", help="overwrite the file if it exists")
    init.set_defaults(run=_init)

    check = actions.add_parser(
        "check",
        help="say whether a file is valid and what it means on this machine",
        description="Exit code 0: valid; 2: not valid.",
    )
    check.add_argument("file", type=Path, metavar="FILE")
    check.add_argument("--world-size", type=positive_int, default=1, metavar="N", help="ranks that share it (1)")
    check.set_defaults(run=_check)

    migrate = actions.add_parser(
        "migrate",
        help="write a configuration file from the first generation's environment variables",
        description="Reads DFLASH_OFFLOAD_ENABLE, DFLASH_DRAM_LIMIT and other DFLASH_* from the environment, and says "
        "what was made of each. A bare number of a size is taken as GiB below 1024, as bytes from 2^30 on, and as MiB "
        "between; GB is 10^9 bytes, G and GiB are 2^30.",
    )
    migrate.add_argument("path", nargs="?", type=Path, default=Path(DEFAULT_NAME), metavar="PATH", help=DEFAULT_NAME)
    migrate.add_argument("--force", action="store_true", help="overwrite the file if it exists")
    migrate.set_defaults(run=_migrate)


def _init(args: argparse.Namespace) -> int:
    from dflash2.config import Config, MemoryConfig, effective
    from dflash2.config.writing import write_config
    from dflash2.types import MIB

    dram_mb = effective(Config()).dram_machine_bytes // MIB
    values = Config(enable=True, memory=MemoryConfig(dram_capacity_mb=dram_mb)).model_dump(exclude_none=True)
    write_config(args.path, values, force=args.force)
    print(f"wrote {args.path}")
    return 0


def _check(args: argparse.Namespace) -> int:
    from dflash2.config import effective, load_config

    config = load_config(args.file)
    print(f"{args.file} is valid" + ("" if config.enable else "; enable is not true, so an engine would run unchanged"))
    try:
        print("\n".join(effective(config, args.world_size).describe()))
    except DFlash2Error as error:
        # The file may be meant for another machine, so this is said but is not the file's fault.
        print(f"but it does not fit this machine: {error}")
    return 0


def _migrate(args: argparse.Namespace) -> int:
    from dflash2.config.first_generation import migrate, old_variables
    from dflash2.config.writing import write_config

    if not old_variables(os.environ):
        raise DFlash2Error("no DFLASH_* variable is set, so there is nothing to migrate; run it where the service runs")
    migration = migrate(os.environ)
    write_config(args.path, migration.document, force=args.force)
    print(f"wrote {args.path}")
    print("\n".join(migration.notes))
    return 0
