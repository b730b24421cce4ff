"""``dflash2 top``: what the monitoring page shows, in a terminal."""

from __future__ import annotations

import argparse
import json
import time
import urllib.error
import urllib.request
from typing import Any

from dflash2.commands.arguments import KEY_VARIABLE, api_key
from dflash2.errors import DFlash2Error

DEFAULT_URL = "http://127.0.0.1:8000"
TIMEOUT_S = 30.0


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add ``top``."""
    parser = subparsers.add_parser("top", help="watch a running server in the terminal")
    parser.add_argument("--url", default=DEFAULT_URL, help=f"of the server or of its page (default {DEFAULT_URL})")
    parser.add_argument("--token", metavar="KEY", help=f"the server's API key (default: the variable {KEY_VARIABLE})")
    parser.add_argument("--interval-s", type=_seconds, default=1.0, metavar="S", help="between two looks (default 1)")
    parser.add_argument("--once", action="store_true", help="print one picture and end")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Watch until interrupted, or once.

    Returns:
        0.

    Raises:
        DFlash2Error: the server gives no statistics.
    """
    from rich.console import Console
    from rich.live import Live

    from dflash2.monitoring.terminal import screen

    url = route_url(args.url, "stats")
    token = api_key(args.token)
    now = fetch(url, token)
    console = Console()
    if args.once:
        console.print(screen(now, None, args.url))
        return 0
    with Live(screen(now, None, args.url), console=console, screen=True, auto_refresh=False) as live:
        while True:
            time.sleep(args.interval_s)
            before, now = now, fetch(url, token)
            live.update(screen(now, before, args.url), refresh=True)


def route_url(url: str, route: str) -> str:
    """Where a server, named by its own address or by that of its page, has what is below ``/dflash2/``."""
    return f"{url.rstrip('/').removesuffix('/dflash2')}/dflash2/{route}"


def fetch(url: str, token: str | None) -> dict[str, Any]:
    """What a route answers. Raises DFlash2Error with what is wrong."""
    headers = {} if token is None else {"Authorization": f"Bearer {token}"}
    try:
        request = urllib.request.Request(url, headers=headers)
        with urllib.request.urlopen(request, timeout=TIMEOUT_S) as answer:
            found: dict[str, Any] = json.load(answer)
    except urllib.error.HTTPError as error:
        hint = f"; give its key with --token or {KEY_VARIABLE}" if error.code == 401 else ""
        raise DFlash2Error(f"{url} answers {error.code} {error.reason}{hint}") from error
    except (OSError, ValueError) as error:
        raise DFlash2Error(f"no answer from {url}: {error}") from error
    return found


def _seconds(text: str) -> float:
    value = float(text)
    if not 0.1 <= value <= 3600:
        raise argparse.ArgumentTypeError("must be 0.1 to 3600 seconds")
    return value
