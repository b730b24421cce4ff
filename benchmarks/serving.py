"""What the front end, reservations and admission are worth: the same requests against ``dflash2 serve``, part by part.

    python benchmarks/serving.py --model MODEL.gguf [--trace AZURE.csv] [--parts PART ...] [--json FILE]

- ``burst``: 64 requests of 50 to 6,000 tokens at once, HBM for a quarter of them. Lengths, the turn (32 tokens) and
  what counts as short (200 tokens) are divided by ``--burst-scale`` so that a small machine is done in time; so are
  blocks (32 tokens), down to 8.
- ``saturated``: 16 clients that always have a request open, HBM for more than all of them; twice each, by turns.
- ``trace``: arrivals and lengths of one of Azure's LLM inference traces, scaled, HBM for a quarter.
- ``calm``: the same, eight times as slow, with HBM for more than all of it.

Prompts are plain text, without a chat's template, so that they are as long as planned; that is checked. Each variant
differs from ``full`` in one setting and gets a server of its own on the loopback interface, which ends with it. Compare
variants of one run only. What is hidden counts from the first token on: before it there was no step to hide anything
behind. ``burst_simulated.py`` is the burst at full length, with a model that only takes time. Some ten minutes
on two cores.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from serving_client import Planned, replay, served
from serving_load import Result, burst, configuration, judge, steady, trace

VARIANTS: dict[str, dict[str, Any]] = {
    "full": {},
    "pipeline off": {"pipeline": {"enabled": False}},
    "smoothing off": {"scheduling": {"smoothing": False}},
    "reservation off": {"scheduling": {"reserve": "prompt"}},
    "first come": {"scheduling": {"order": "first_come", "smoothing": False}},
}
SHORT_TOKENS = 200
QUANTUM_TOKENS = 32
BLOCK_TOKENS = 32
CLIENTS = 16
"""Of the saturated part."""
REQUESTS = {"burst": 64, "saturated": 24, "trace": 20, "calm": 6}
"""Of each part, so that all of them take some ten minutes."""
COLUMNS: tuple[tuple[str, str, str], ...] = (
    ("makespan_s", "makespan", "{:.1f} s"),
    ("output_tokens_per_s", "tok/s", "{:.1f}"),
    ("ttft_p50_s", "TTFT p50", "{:.2f} s"),
    ("ttft_p99_s", "p99", "{:.2f} s"),
    ("ttft_p99_short_s", "p99 short", "{:.2f} s"),
    ("mean_end_s", "mean end", "{:.1f} s"),
    ("longest_s", "longest", "{:.1f} s"),
    ("swap_bytes", "swapped", "{:.3g} B"),
)


@dataclass(frozen=True)
class Part:
    """Requests, how much of them HBM holds, and what is compared."""

    plan: list[Planned]
    oversubscription: float
    scale: float
    variants: tuple[str, ...]
    num_clients: int | None = None
    rounds: int = 1


@dataclass(frozen=True)
class Check:
    """What is asked of a run, as a ratio between two variants of it or as a plain figure."""

    text: str
    value: float
    limit: float
    at_least: bool = False

    @property
    def is_met(self) -> bool:
        return self.value >= self.limit if self.at_least else self.value <= self.limit


def parts_of(args: argparse.Namespace) -> dict[str, Part]:
    parts = {}
    if "burst" in args.parts:
        variants = ("full", "smoothing off", "first come")
        parts["burst"] = Part(burst(REQUESTS["burst"], args.burst_scale), 4.0, args.burst_scale, variants)
    if "saturated" in args.parts:
        plan = steady(REQUESTS["saturated"])
        parts["saturated"] = Part(plan, 0.8, 4.0, ("full", "pipeline off"), CLIENTS, rounds=2)
    if args.trace is not None and "trace" in args.parts:
        plan = trace(args.trace, REQUESTS["trace"], args.largest, args.speed)
        parts["trace"] = Part(plan, 4.0, 4.0, ("full", "pipeline off", "smoothing off", "reservation off"))
    if args.trace is not None and "calm" in args.parts:
        plan = trace(args.trace, REQUESTS["calm"], args.largest, args.speed / 8)
        parts["calm"] = Part(plan, 0.8, 4.0, ("full", "pipeline off"))
    return parts


def run_part(name: str, part: Part, model: str, began: float) -> dict[str, list[Result]]:
    """All variants one after the other, as many rounds as are asked for."""
    context = 2 * max(planned.prompt_tokens + planned.output_tokens for planned in part.plan)
    quantum = max(1, round(QUANTUM_TOKENS / part.scale))
    block = max(8, 1 << round(math.log2(BLOCK_TOKENS / part.scale)))
    results: dict[str, list[Result]] = {variant: [] for variant in part.variants}
    for variant in part.variants * part.rounds:
        config = configuration(part.plan, part.oversubscription, quantum, VARIANTS[variant], block)
        with served(model, config, context) as url:
            replayed = asyncio.run(replay(url, part.plan, part.num_clients))
        one = judge(part.plan, replayed, SHORT_TOKENS / part.scale)
        results[variant].append(one)
        passed = time.perf_counter() - began
        print(f"{passed:4.0f} s  {name}, {variant}: {one.makespan_s:.1f} s", file=sys.stderr, flush=True)
        for error in {sample.error for sample in replayed.samples if sample.error}:
            print(f"        {error}", file=sys.stderr)
    return results


def checks_of(name: str, results: dict[str, list[Result]]) -> list[Check]:
    """What is asked of each part."""
    every = [one for variant in results.values() for one in variant]
    full = results["full"][0]
    checks = [
        Check(f"{name}: failures", sum(one.num_failed for one in every), 0),
        Check(f"{name}: prompt tokens other than planned", sum(one.prompt_tokens_off for one in every), 0),
    ]
    if name == "burst":
        off, first = results["smoothing off"][0], results["first come"][0]
        checks += [
            Check("burst: unplanned swaps and waits", full.num_unplanned, 0),
            Check("burst: swap bytes / smoothing off", full.swap_bytes / max(1, off.swap_bytes), 0.7),
            Check("burst: makespan / smoothing off", full.makespan_s / off.makespan_s, 1.05),
            Check("burst: tokens/s / smoothing off", full.output_tokens_per_s / off.output_tokens_per_s, 0.97, True),
            Check("burst: p99 TTFT, all / smoothing off", full.ttft_p99_s / off.ttft_p99_s, 1.1),
            Check("burst: p99 TTFT, short / first come", full.ttft_p99_short_s / first.ttft_p99_short_s, 0.5),
            Check("burst: end of the longest / first come", full.longest_s / first.longest_s, 1.5),
        ]
    else:
        on_s, off_s = (sum(one.makespan_s for one in results[variant]) for variant in ("full", "pipeline off"))
        checks.append(Check(f"{name}: tokens/s / pipeline off", off_s / on_s, 1.0, True))
    if name == "saturated":
        hidden = [one.hidden_share for one in results["full"] if one.hidden_share is not None]
        checks.append(Check("saturated: tokenising hidden behind steps", min(hidden, default=0.0), 0.95, True))
    if name in ("saturated", "calm"):
        assemble = max(one.assemble_share for one in results["full"])
        checks.append(Check(f"{name}: putting steps together, share of the run", assemble, 0.01))
    if name == "calm":
        checks.append(Check("calm: waiting for admission, all requests, s", full.admission_wait_s, 0.01))
    return checks


def show(name: str, results: dict[str, list[Result]]) -> None:
    table = Table(title=f"{name}: each variant, and its ratio to the first one")
    for title in ("variant", *(title for _, title, _ in COLUMNS), "failed", "unplanned", "hidden", "assemble"):
        table.add_column(title, justify="left" if title == "variant" else "right")
    full = results["full"][0]
    for variant, one in ((variant, one) for variant, rounds in results.items() for one in rounds):
        cells = []
        for field, _, form in COLUMNS:
            value, base = getattr(one, field), getattr(full, field)
            ratio = f" ({value / base:.2f})" if one is not full and base else ""
            cells.append(form.format(value) + ratio)
        hidden = "-" if one.hidden_share is None else f"{one.hidden_share:.1%}"
        table.add_row(variant, *cells, str(one.num_failed), str(one.num_unplanned), hidden, f"{one.assemble_share:.2%}")
    Console(width=200).print(table)


def show_checks(checks: Sequence[Check]) -> None:
    table = Table(title="what is asked")
    for title in ("", "figure", "limit", ""):
        table.add_column(title)
    for one in checks:
        sign = ">=" if one.at_least else "<="
        table.add_row(one.text, f"{one.value:.3f}", f"{sign} {one.limit:g}", "met" if one.is_met else "missed")
    Console(width=140).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--trace", type=Path, help="one of Azure's LLM inference traces, for trace and calm")
    parser.add_argument("--parts", nargs="+", choices=REQUESTS, default=list(REQUESTS))
    parser.add_argument("--burst-scale", type=float, default=12.0, help="what the burst's lengths are divided by")
    parser.add_argument(
        "--largest", type=int, default=500, help="longest request of the trace, in tokens, after scaling"
    )
    parser.add_argument("--speed", type=float, default=4.0, help="what the trace's arrival times are divided by")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the server ends too
    began = time.perf_counter()
    document: dict[str, Any] = {"settings": {name: str(value) for name, value in vars(args).items()}, "parts": {}}
    checks: list[Check] = []
    for name, part in parts_of(args).items():
        results = run_part(name, part, args.model, began)
        show(name, results)
        checks += checks_of(name, results)
        document["parts"][name] = {variant: [asdict(one) for one in rounds] for variant, rounds in results.items()}
        document["checks"] = [asdict(one) | {"is_met": one.is_met} for one in checks]
        if args.json:  # after each part: what was measured is not lost if a later one fails
            args.json.write_text(json.dumps(document, indent=1), encoding="utf-8")
    show_checks(checks)


if __name__ == "__main__":
    main()
