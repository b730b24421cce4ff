"""Short ways to replay something in a test."""

from __future__ import annotations

import io
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from rich.console import Console

from dflash2.config import Config
from dflash2.replay.events import Event
from dflash2.replay.readers import read_events
from dflash2.replay.results import Result
from dflash2.replay.session import ReplayPlan, run_plan
from dflash2.replay.sizes import Slots
from dflash2.replay.source import LineSource
from dflash2.types import Tier

SHARED_TRACES = Path(__file__).parents[3] / "shared" / "traces"
"""Traces of others, beside the repository where they are at hand."""
BYTES_PER_TOKEN = 2048


def silent() -> Console:
    return Console(file=io.StringIO())


def make_plan(
    path: Path, policies: Sequence[str], capacities: Iterable[Slots], config: Config | None = None
) -> ReplayPlan:
    return ReplayPlan(str(path), tuple(policies), tuple(capacities), config or Config(), 1, BYTES_PER_TOKEN)


def run_trace(path: Path, policies: Sequence[str], sizes: Iterable[int]) -> list[Result]:
    """Single tiers; the results of the first policy at all sizes come first."""
    return run_plan(make_plan(path, policies, [{Tier.HBM: size} for size in sizes]), silent())


def events_of(text: str) -> Iterator[Event]:
    return read_events(LineSource(None, io.StringIO(text), None, "trace"))
