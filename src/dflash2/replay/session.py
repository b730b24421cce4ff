"""One run of ``dflash2 replay``: a trace, some policies, some sizes."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from dflash2.config import Config
from dflash2.errors import TraceError
from dflash2.replay.caches import ASSUMED, Replayed, make_replayed
from dflash2.replay.device import DeviceModel
from dflash2.replay.events import Arrival, Event
from dflash2.replay.managed import BlockNames, BlockSize
from dflash2.replay.readers import read_events
from dflash2.replay.results import Result
from dflash2.replay.run import first_requests, replay
from dflash2.replay.sizes import Slots, slots_of_config
from dflash2.replay.source import LineSource, open_source

SHOW_EVERY = 50
"""Requests between two movements of the progress bar."""


@dataclass(frozen=True, slots=True)
class ReplayPlan:
    """What to replay.

    Attributes:
        trace: a path, or ``-``.
        policies: names, see ``caches.policy_names``.
        capacities: sizes to try; empty: the tiers of ``config``.
        config: settings of the policy, and sizes.
        ranks: that share DRAM and NVMe of ``config``.
        bytes_per_token: KV of one token on one rank.
        device: for modelled times; None without.
        upto: how many requests; None for all.
    """

    trace: str
    policies: tuple[str, ...]
    capacities: tuple[Slots, ...]
    config: Config
    ranks: int
    bytes_per_token: int
    device: DeviceModel | None = None
    upto: int | None = None


def run_plan(plan: ReplayPlan, console: Console) -> list[Result]:
    """Read the trace once and replay it with every policy at every size.

    Args:
        plan: see there.
        console: shows how far it is, if it is a terminal.

    Raises:
        TraceError, ConfigError, RequestError: see ``read_events``, ``slots_of_config``, ``make_replayed``.
    """
    with open_source(plan.trace) as source:
        events = read_events(source, None if plan.device is None else plan.device.timing())
        first = next(events, None)
        if not isinstance(first, Arrival):
            raise TraceError(f"{source.name} holds no request")
        block = BlockSize(first.block_tokens, plan.bytes_per_token * first.block_tokens)
        capacities = plan.capacities or (slots_of_config(plan.config, plan.ranks, block.num_bytes),)
        names = BlockNames()
        replayed = [
            make_replayed(policy, slots, plan.config, block, names, plan.device or ASSUMED)
            for policy, slots in itertools.product(plan.policies, capacities)
        ]
        _show(plan, source, itertools.chain([first], events), replayed, console)
    return [Result(one.policy, one.slots, one.outcomes(), block.num_bytes, plan.device) for one in replayed]


def _show(
    plan: ReplayPlan, source: LineSource, events: Iterator[Event], replayed: list[Replayed], console: Console
) -> None:
    columns = (TextColumn("replay"), BarColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("", total=plan.upto or source.total_bytes)
        done = 0

        def step() -> None:
            nonlocal done
            done += 1
            if done % SHOW_EVERY == 0:
                progress.update(
                    task, description=f"{done} requests", completed=done if plan.upto else source.read_bytes
                )

        replay(first_requests(events, plan.upto), replayed, step)
