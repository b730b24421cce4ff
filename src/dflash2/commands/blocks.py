"""``dflash2 blocks``: the hottest and coldest blocks of a running server, and why."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.table import Table

from dflash2.commands.arguments import KEY_VARIABLE, api_key
from dflash2.commands.top import DEFAULT_URL, fetch, route_url


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add ``blocks``."""
    parser = subparsers.add_parser("blocks", help="show the hottest and coldest blocks of a running server, with why")
    parser.add_argument("--url", default=DEFAULT_URL, help=f"of the server or of its page (default {DEFAULT_URL})")
    parser.add_argument("--token", metavar="KEY", help=f"the server's API key (default: the variable {KEY_VARIABLE})")
    parser.add_argument("--count", type=int, default=10, choices=range(1, 101), metavar="N", help="of each (10)")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print both tables.

    Returns:
        0.

    Raises:
        DFlash2Error: the server gives no answer.
    """
    from rich.console import Console

    token = api_key(args.token)
    report = fetch(route_url(args.url, f"blocks?count={args.count}"), token)
    console = Console()
    for title in ("hottest", "coldest"):
        console.print(_table(title, report[title]))
    return 0


def _table(title: str, blocks: list[dict[str, Any]]) -> Table:
    from rich.table import Table

    table = Table(title=title, title_justify="left", expand=True)
    for name in ("block", "heat", "on", "state", "position", "holders", "misses"):
        table.add_column(
            name, justify="right" if name in ("block", "heat", "position", "holders", "misses") else "left"
        )
    table.add_column("why", ratio=1)
    for block in blocks:
        state = block["state"] + (", pinned" if block["pinned"] else "")
        figures = (str(block[name]) for name in ("position", "holders", "misses"))
        table.add_row(
            str(block["block_id"]),
            f"{block['heat']:.2f}",
            " ".join(block["tiers"]),
            state,
            *figures,
            _why(block["why"]),
        )
    return table


def _why(reasons: dict[str, Any]) -> str:
    return ", ".join(f"{name.replace('_', ' ')} {_figure(value)}" for name, value in reasons.items())


def _figure(value: Any) -> str:
    if isinstance(value, dict):
        return f"({_why(value)})"
    return f"{value:.3g}" if isinstance(value, float) else str(value)
