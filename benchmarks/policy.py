"""What a policy costs: microseconds per block reference of a trace, in the policy and in the whole replay.

    python benchmarks/policy.py TRACE --capacity-blocks 11084 [--upto N] [--policy heat,lru-tail] [--json]

Time is the thread's own CPU time, so that other load on the machine counts little.
"""

from __future__ import annotations

import argparse
import functools
import json
import time
from typing import Any

from rich.console import Console
from rich.table import Table

from dflash2.config import Config
from dflash2.replay.caches import Managed, make_replayed
from dflash2.replay.events import Arrival, Event
from dflash2.replay.managed import BlockNames, BlockSize
from dflash2.replay.readers import read_events
from dflash2.replay.run import first_requests, replay
from dflash2.replay.sizes import parse_capacity
from dflash2.replay.source import open_source

METHODS = ("on_arrival", "on_use", "on_allocate", "on_finish", "refresh", "is_cold", "order", "worth_storing")
LIMIT_US = 2.0
"""What heat may cost per block reference, amortised."""


class Stopwatch:
    """Adds up the CPU time spent in some methods of an object, nested calls once."""

    def __init__(self, watched: object) -> None:
        self.seconds = dict.fromkeys(METHODS, 0.0)
        self._inside = False
        for name in METHODS:
            setattr(watched, name, self._timed(name, getattr(watched, name)))

    def _timed(self, name: str, method: Any) -> Any:
        @functools.wraps(method)
        def timed(*arguments: Any) -> Any:
            if self._inside:
                return method(*arguments)
            self._inside = True
            start = time.thread_time()
            try:
                return method(*arguments)
            finally:
                self.seconds[name] += time.thread_time() - start
                self._inside = False

        return timed


def measure(events: list[Event], policy: str, capacity: str, block: BlockSize) -> dict[str, Any]:
    """Replay once; figures per block reference."""
    cache = make_replayed(policy, parse_capacity(capacity), Config(), block, BlockNames())
    if not isinstance(cache, Managed):
        raise SystemExit(f"{policy} does not run in a server; choose heat, lru-tail or, for several tiers, lru")
    watch = Stopwatch(cache.cache.policy)
    start = time.thread_time()
    replay(events, [cache])
    total = time.thread_time() - start
    outcomes = cache.outcomes()
    per = 1e6 / max(1, outcomes.num_references)
    return {
        "policy": policy,
        "capacity_blocks": capacity,
        "block_refs": outcomes.num_references,
        "prefix_hit_ratio": outcomes.prefix_hit_ratio,
        "policy_us_per_ref": sum(watch.seconds.values()) * per,
        "replay_us_per_ref": total * per,
        "by_call_us_per_ref": {name: seconds * per for name, seconds in watch.seconds.items()},
        "limit_us_per_ref": LIMIT_US,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace")
    parser.add_argument("--capacity-blocks", required=True)
    parser.add_argument("--policy", default="heat,lru-tail")
    parser.add_argument("--upto", type=int)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    with open_source(args.trace) as source:
        events = list(first_requests(read_events(source), args.upto))
    first = events[0]
    assert isinstance(first, Arrival)
    block = BlockSize(first.block_tokens, 1 << 20)
    results = [measure(events, policy, args.capacity_blocks, block) for policy in args.policy.split(",")]
    if args.json:
        print(json.dumps(results, indent=2))
        return
    table = Table(
        "policy", "found %", "policy µs", "limit µs", "replay µs", *METHODS, title="CPU time per block reference"
    )
    for one in results:
        calls = [f"{microseconds:.2f}" for microseconds in one["by_call_us_per_ref"].values()]
        figures = (one["policy_us_per_ref"], LIMIT_US, one["replay_us_per_ref"])
        row = (one["policy"], f"{100 * one['prefix_hit_ratio']:.2f}", *(f"{value:.2f}" for value in figures), *calls)
        table.add_row(*row)
    Console(width=200).print(table)


if __name__ == "__main__":
    main()
