"""``dflash2 bench``: load for any server that speaks OpenAI's API, with what it felt like to the clients."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dflash2.commands.arguments import KEY_VARIABLE, api_key, positive_float, positive_int
from dflash2.errors import DFlash2Error

if TYPE_CHECKING:
    from dflash2.bench.workload import Session


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add ``bench``."""
    parser = subparsers.add_parser(
        "bench",
        help="put load on a server and measure what its clients see",
        description="Made-up conversations, or the requests of a trace, against any OpenAI-compatible server. Swaps "
        "are shown where the server is ours. Exit code 0: every request succeeded; 1: some failed.",
    )
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="of the server (default http://127.0.0.1:8000)")
    parser.add_argument("--model", metavar="NAME", help="name in the requests (default: the first that the server has)")
    parser.add_argument("--api-key", metavar="KEY", help=f"default: the variable {KEY_VARIABLE}")
    parser.add_argument("--concurrency", type=positive_int, default=8, metavar="N", help="conversations at once (8)")
    parser.add_argument("--sessions", type=positive_int, default=16, metavar="N", help="conversations in all (16)")
    parser.add_argument("--turns", type=positive_int, default=3, metavar="N", help="questions in each (3)")
    parser.add_argument("--prompt-words", type=positive_int, default=200, metavar="N", help="of each question (200)")
    parser.add_argument("--output-tokens", type=positive_int, default=64, metavar="N", help="longest answer (64)")
    parser.add_argument("--shared-words", type=_count, default=0, metavar="N", help="of a shared system prompt (0)")
    parser.add_argument("--groups", type=positive_int, default=1, metavar="N", help="different system prompts (1)")
    parser.add_argument("--seed", type=int, default=0, help="the same seed makes the same conversations (0)")
    parser.add_argument(
        "--ignore-eos", action="store_true", help="always produce the longest answer; not all servers can"
    )
    parser.add_argument("--trace", type=Path, metavar="FILE", help="requests of a trace in place of made-up ones")
    parser.add_argument("--limit", type=positive_int, default=1000, metavar="N", help="requests of the trace (1000)")
    parser.add_argument(
        "--speed", type=positive_float, default=1.0, metavar="X", help="of the trace; 2: twice as fast (1)"
    )
    parser.add_argument(
        "--words-per-block", type=positive_int, default=512, metavar="N", help="for each 512 tokens of the trace (512)"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything that was measured there")
    parser.add_argument(
        "--plot", type=Path, metavar="FILE", help="TTFT over time with swaps beside it, .png, .svg or .pdf"
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Run the load and print the result.

    Returns:
        0 if every request succeeded, else 1.

    Raises:
        DFlash2Error: no server is there, a package is missing, or a file cannot be read or written.
    """
    try:
        import httpx  # noqa: F401 - looked for before anything is sent
    except ImportError as error:
        raise DFlash2Error("dflash2 bench needs httpx: pip install 'dflash2[bench]'") from error
    import asyncio

    from rich.console import Console

    from dflash2.bench.load import Target, run_load
    from dflash2.bench.progress import Watcher
    from dflash2.bench.report import as_json, plot, summary, table

    key = api_key(args.api_key)
    more: dict[str, Any] = {"ignore_eos": True} if args.ignore_eos else {}
    target = Target(args.url.rstrip("/").removesuffix("/v1"), args.model, key, more)
    sessions = _sessions(args)
    console = Console()
    with Watcher(console, sum(len(session.turns) for session in sessions)) as watcher:
        result = asyncio.run(run_load(target, sessions, args.concurrency, watcher.show))
    console.print(table(result))
    for reason, count in summary(result)["errors"].items():
        console.print(f"{count} failed: {reason}", markup=False)
    if args.json is not None:
        settings = {name: str(value) for name, value in vars(args).items() if name not in ("run", "api_key", "debug")}
        _write(args.json, json.dumps(as_json(result, settings), indent=1))
    if args.plot is not None:
        plot(result, args.plot)
    return 1 if summary(result)["failed"] else 0


def _sessions(args: argparse.Namespace) -> list[Session]:
    from dflash2.bench.workload import ChatShape, TraceReader, chats

    if args.trace is not None:
        return TraceReader(args.trace, args.limit, args.speed, args.words_per_block, args.output_tokens).sessions()
    shape = ChatShape(
        args.sessions, args.turns, args.prompt_words, args.output_tokens, args.shared_words, args.groups, args.seed
    )
    return chats(shape)


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise DFlash2Error(f"cannot write {path}: {error.strerror or error}") from error


def _count(text: str) -> int:
    value = int(text)
    if value < 0:
        raise argparse.ArgumentTypeError("must be 0 or more")
    return value
