"""Results as tables and as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from dflash2.replay.results import Result
from dflash2.replay.sizes import is_single
from dflash2.types import Tier


def report_json(trace: str, results: Sequence[Result]) -> dict[str, Any]:
    """The whole report. Shares and ratios are in [0, 1]."""
    return {"trace": trace, "results": [result.to_json() for result in results]}


def print_report(results: Sequence[Result], console: Console) -> None:
    """One table of results, and one of calibration for each policy that has heat."""
    console.print(_results_table(results))
    for result in results:
        if result.policy == "heat" and result.outcomes.calibration:
            console.print(_calibration_table(result))


def size_text(result: Result) -> str:
    """Blocks of the tier, or of all tiers."""
    if is_single(result.slots):
        return f"{result.capacity_blocks:,}"
    return " / ".join(f"{result.slots.get(tier, 0):,}" for tier in Tier)


def _results_table(results: Sequence[Result]) -> Table:
    several = any(not is_single(result.slots) for result in results)
    timed = any(result.device is not None for result in results)
    table = Table(title="Leading blocks found at arrival, of all blocks of all prompts")
    table.add_column("policy")
    headings = ["blocks" + (" (HBM / DRAM / NVMe)" if several else ""), "requests", "block references", "found %"]
    if several:
        headings += ["from HBM %", "DRAM %", "NVMe %", "to HBM GB", "from HBM GB", "NVMe written GB", "prefetch used %"]
    if timed:
        headings += ["TTFT p50 ms", "p90", "p99"]
    for heading in headings:
        table.add_column(heading, justify="right")
    for result in results:
        table.add_row(*_row(result, several=several, timed=timed))
    return table


def _row(result: Result, *, several: bool, timed: bool) -> list[str]:
    outcomes = result.outcomes
    row = [
        result.policy,
        size_text(result),
        f"{len(outcomes.hits):,}",
        f"{outcomes.num_references:,}",
        f"{100 * outcomes.prefix_hit_ratio:.2f}",
    ]
    if several:
        references = max(1, outcomes.num_references)
        row += [f"{100 * hits / references:.2f}" for hits in outcomes.hits_by_tier().values()]
        movement, accuracy = outcomes.movement, result.prefetch_accuracy
        row += [f"{size / 1e9:.1f}" for size in (movement.bytes_in, movement.bytes_out, result.nvme_bytes_written)]
        row.append("–" if accuracy is None else f"{100 * accuracy:.1f}")
    if timed:
        row += [f"{value:.0f}" for value in (result.ttft_ms() or {}).values()]
    return row


def _calibration_table(result: Result) -> Table:
    table = Table(title=f"Heat at {size_text(result)} blocks: what it said, and what share was used within the horizon")
    for heading in ("mean heat", "share used", "blocks looked at"):
        table.add_column(heading, justify="right")
    for one in result.outcomes.calibration:
        table.add_row(f"{one.heat:.3f}", f"{one.share_used:.3f}", f"{one.num_blocks:,}")
    return table
