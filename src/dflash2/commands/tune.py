"""``dflash2 tune``: settings for recorded traffic, within what the machine can give."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING

from dflash2.commands.arguments import positive_int
from dflash2.commands.replay import bytes_per_token

if TYPE_CHECKING:
    from rich.console import Console

    from dflash2.config import Config
    from dflash2.replay.device import DeviceModel
    from dflash2.replay.tuning import Outcome, Traffic


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add ``tune``."""
    parser = subparsers.add_parser(
        "tune",
        help="search settings on recorded traffic and write a configuration",
        description="Tries cold_threshold, prefetch_window, swap_batch_size and shares of the DRAM and NVMe that the "
        "configuration gives, shows what each costs and brings, and writes the best: the shortest modelled mean "
        "TTFT, with the fewest writes to NVMe among those within 1 % of it.",
    )
    parser.add_argument("trace", metavar="TRACE", help="as for `dflash2 replay`")
    parser.add_argument(
        "--config", type=Path, required=True, metavar="FILE", help="the settings now; its capacities are the budget"
    )
    parser.add_argument("--nvme-gb-per-hour", type=_amount, metavar="GB", help="the most that may be written to NVMe")
    parser.add_argument("--trials", type=positive_int, default=30, metavar="N", help="settings to try (30)")
    parser.add_argument("--upto", type=positive_int, metavar="N", help="use the first N requests only")
    parser.add_argument("--device-profile", type=Path, metavar="FILE", help="speeds; from `dflash2 doctor --probe`")
    parser.add_argument("--bytes-per-token", type=positive_int, metavar="N", help="as for `dflash2 replay`")
    parser.add_argument("--ranks", type=positive_int, default=1, metavar="N", help="that share DRAM and NVMe (1)")
    parser.add_argument("--jobs", type=positive_int, default=1, metavar="N", help="trials at the same time (1)")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of the search (0)")
    parser.add_argument("--output", type=Path, metavar="FILE", help="write the configuration found")
    parser.add_argument("--force", action="store_true", help="overwrite the file if it exists")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw the trade-off (.png, .svg)")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Search, print, write.

    Raises:
        TraceError: the trace cannot be read.
        ConfigError: configuration or profile are wrong, or capacities are missing.
        RequestError: optuna or matplotlib are missing.
        StorageError: a file cannot be written.
    """
    from rich.console import Console

    from dflash2.config import load_config
    from dflash2.config.writing import write_config
    from dflash2.replay.device import DeviceModel, read_device_model
    from dflash2.replay.plots import check_plotting
    from dflash2.replay.tuning import best_of, check_tuning
    from dflash2.replay.tuning_report import changed_values, plot_tuning, tuning_json, tuning_table

    check_tuning()
    if args.plot is not None:
        check_plotting()
    base = load_config(args.config)
    device = DeviceModel() if args.device_profile is None else read_device_model(args.device_profile)
    outcomes = _search(args, base, _traffic(args, base, device), Console(stderr=True))
    limit = None if args.nvme_gb_per_hour is None else args.nvme_gb_per_hour * 1e9
    chosen = best_of(outcomes, limit)
    if args.json:
        print(json.dumps(tuning_json(args.trace, outcomes, chosen), indent=2))
    else:
        Console().print(tuning_table(outcomes, chosen))
        if limit is not None and chosen.nvme_bytes_per_hour > limit:
            print(f"nothing tried writes less than {args.nvme_gb_per_hour} GB per hour; this writes least")
    if args.plot is not None:
        plot_tuning(outcomes, chosen, args.plot)
    if args.output is not None:
        write_config(args.output, changed_values(chosen.config), force=args.force)
        if not args.json:
            print(f"wrote {args.output}")
    return 0


def _traffic(args: argparse.Namespace, base: Config, device: DeviceModel) -> Traffic:
    from dflash2.errors import TraceError
    from dflash2.replay.events import Arrival
    from dflash2.replay.managed import BlockSize
    from dflash2.replay.readers import read_events
    from dflash2.replay.run import first_requests
    from dflash2.replay.source import open_source
    from dflash2.replay.tuning import Traffic

    with open_source(args.trace) as source:
        events = list(first_requests(read_events(source, device.timing()), args.upto))
        if not events or not isinstance(events[0], Arrival):
            raise TraceError(f"{source.name} holds no request")
    tokens = events[0].block_tokens
    size = args.bytes_per_token or bytes_per_token(device, base)
    return Traffic(events, BlockSize(tokens, size * tokens), args.ranks, device)


def _search(args: argparse.Namespace, base: Config, traffic: Traffic, console: Console) -> list[Outcome]:
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    from dflash2.replay.tuning import search

    columns = (TextColumn("tune"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("", total=args.trials)
        return search(
            traffic.try_out, base, args.trials, lambda: progress.advance(task), seed=args.seed, jobs=args.jobs
        )


def _amount(text: str) -> float:
    value = float(text)
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"must be a number of GB, not {text}")
    return value
