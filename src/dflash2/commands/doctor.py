"""``dflash2 doctor``: look at this machine and a configuration before the start, and measure the machine."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from dflash2.commands.arguments import positive_int

if TYPE_CHECKING:
    from rich.console import Console

    from dflash2.doctor.case import Case
    from dflash2.doctor.profile import DeviceProfile

EXAMPLE_TOKENS = 32768


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add ``doctor``."""
    parser = subparsers.add_parser(
        "doctor",
        help="check this machine and a configuration before the start",
        description="Exit code 0: all well; 1: at least one warning; 2: at least one error.",
    )
    parser.add_argument("--config", type=Path, metavar="FILE", help="dflash2_config.json; without it the defaults")
    parser.add_argument("--world-size", type=positive_int, default=1, metavar="N", help="ranks on the machine (1)")
    parser.add_argument(
        "--model", metavar="MODEL", help="model id in the local cache, folder or config.json: sizes blocks exactly"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--probe", action="store_true", help="measure memory and disk as well; takes some seconds")
    parser.add_argument(
        "--profile", type=Path, metavar="FILE", help="write what --probe measured there, for `dflash2 plan --profile`"
    )
    parser.add_argument(
        "--probe-mb",
        type=positive_int,
        default=256,
        metavar="MB",
        help="most that is moved at once, in MiB (256)",
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Check, then measure if asked.

    Returns:
        0, 1 or 2; see the help.

    Raises:
        ModelError: ``--model`` cannot be read.
        StorageError: a measurement or the profile failed.
        ConfigError: ``--profile`` without ``--probe``.
    """
    from rich.console import Console

    from dflash2.doctor.case import open_case, read_config
    from dflash2.doctor.checks import exit_code, run_checks
    from dflash2.doctor.machine import Machine
    from dflash2.doctor.report import print_report, report_json
    from dflash2.errors import ConfigError

    if args.profile is not None and not args.probe:
        raise ConfigError("--profile writes what --probe measures; give both")
    machine, reading = Machine(), read_config(args.config)
    block_bytes = _block_bytes(args.model, machine.environ, reading.config.kv_block.block_size, args.world_size)
    case = open_case(machine, reading, args.world_size, block_bytes)
    results = run_checks(case)
    console = Console(stderr=args.json, highlight=False)
    if not args.json:
        print_report(results, console)
    profile = _probe(case, args.probe_mb, console) if args.probe else None
    if profile is not None and args.profile is not None:
        from dflash2.doctor.profile import write_profile

        write_profile(profile, args.profile)
    if args.json:
        document = report_json(results)
        print(json.dumps(document | ({"profile": profile.to_json()} if profile is not None else {}), indent=2))
    elif profile is not None:
        console.print("\n".join(_profile_lines(profile, case)), markup=False)
    return exit_code(results)


def _block_bytes(model: str | None, environ: Mapping[str, str], block_size: int, ranks: int) -> int | None:
    if model is None:
        return None
    from dflash2.doctor.model_files import find_model
    from dflash2.doctor.model_shape import read_kv_shape

    return read_kv_shape(find_model(model, environ).config).stride_bytes(block_size, ranks)


def _probe(case: Case, probe_mb: int, console: Console) -> DeviceProfile:
    from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    from dflash2.doctor.host_checks import available_bytes
    from dflash2.doctor.mounts import MEMORY_FILE_SYSTEMS, find_mount
    from dflash2.doctor.probes import STEPS, measure, probe_size
    from dflash2.types import MIB

    folder = case.machine.nearest_existing(case.nvme_path)
    mount = find_mount(case.machine, folder)
    in_memory = mount is not None and mount.file_system in MEMORY_FILE_SYSTEMS
    if in_memory:
        console.print(f"{folder} is memory, not a disk: NVMe is not measured", markup=False)
    memory = min(available_bytes(case) or case.memory_limit.num_bytes, case.memory_limit.num_bytes)
    free = min(case.machine.space(folder).free_bytes, memory)
    size = probe_size(case.block_bytes, free, probe_mb * MIB)
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("", total=len(STEPS))

        def on_step(name: str) -> None:
            progress.update(task, description=f"measuring {name}", completed=STEPS.index(name))

        return measure(size, None if in_memory else folder, on_step)


def _profile_lines(profile: DeviceProfile, case: Case) -> list[str]:
    from dflash2.doctor.cost import swap_cost_lines

    return swap_cost_lines(profile, case.config.kv_block.block_size, EXAMPLE_TOKENS, case.block_bytes is not None)
