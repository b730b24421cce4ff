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
    console.print(_hits_table(results))
    if any(not is_single(result.slots) for result in results):
        console.print(_movement_table(results))
    for result in results:
        if result.policy == "heat" and result.outcomes.calibration:
            console.print(_calibration_table(result))
    for line in write_savings(results):
        console.print(line)


def write_savings(results: Sequence[Result]) -> list[str]:
    """How far heat gets from writing everything to NVMe towards the clairvoyant, for each size that has all three."""
    lines = []
    for heat in (result for result in results if result.policy == "heat"):
        others = {result.policy: result for result in results if result.slots == heat.slots}
        if "write-through" not in others or "clairvoyant" not in others:
            continue
        most, fewest = others["write-through"], others["clairvoyant"]
        distance = most.nvme_bytes_written - fewest.nvme_bytes_written
        if distance > 0 and most.outcomes.num_hits:
            closed = (most.nvme_bytes_written - heat.nvme_bytes_written) / distance
            reused = heat.outcomes.num_hits / most.outcomes.num_hits
            lines.append(
                f"{size_text(heat)} blocks: heat goes {100 * closed:.0f} % of the way from writing everything to NVMe "
                f"to the clairvoyant, with {100 * reused:.1f} % of write-through's hits"
            )
    return lines


def size_text(result: Result) -> str:
    """Blocks of the tier, or of all tiers."""
    if is_single(result.slots):
        return f"{result.capacity_blocks:,}"
    return "/".join(str(result.slots.get(tier, 0)) for tier in Tier)


def _table(title: str, headings: Sequence[str]) -> Table:
    table = Table(title=title)
    table.add_column("policy", no_wrap=True)
    for heading in headings:
        table.add_column(heading, justify="right", no_wrap=heading == "blocks")
    return table


def _hits_table(results: Sequence[Result]) -> Table:
    several = any(not is_single(result.slots) for result in results)
    timed = any(result.device is not None for result in results)
    headings = ["blocks", "found %"]
    headings += [f"{tier.label} %" for tier in Tier] if several else []
    headings += ["TTFT p50 ms", "p90", "p99"] if timed else []
    table = _table("Leading blocks found at arrival, of all blocks of all prompts", headings)
    if results:
        of = results[0].outcomes
        table.caption = f"{len(of.hits):,} requests with {of.num_references:,} blocks"
    for result in results:
        outcomes = result.outcomes
        references = max(1, outcomes.num_references)
        row = [size_text(result), f"{100 * outcomes.prefix_hit_ratio:.2f}"]
        row += [f"{100 * hits / references:.2f}" for hits in outcomes.hits_by_tier().values()] if several else []
        row += [f"{value:.0f}" for value in (result.ttft_ms() or {}).values()] if timed else []
        table.add_row(result.policy, *row)
    return table


def _movement_table(results: Sequence[Result]) -> Table:
    headings = ["blocks", "to HBM GB", "from HBM GB", "NVMe written GB", "prefetch used %", "in time %"]
    table = _table("What was moved", headings)
    for result in results:
        movement = result.outcomes.movement
        sizes = (movement.bytes_in, movement.bytes_out, result.nvme_bytes_written)
        shares = (result.prefetch_accuracy, result.brought_near)
        texts = ["–" if share is None else f"{100 * share:.1f}" for share in shares]
        table.add_row(result.policy, size_text(result), *(f"{size / 1e9:,.1f}" for size in sizes), *texts)
    return table


def _calibration_table(result: Result) -> Table:
    table = Table(title=f"Heat at {size_text(result)} blocks: what it said, and what share was used within the horizon")
    for heading in ("mean heat", "share used", "blocks looked at"):
        table.add_column(heading, justify="right")
    for one in result.outcomes.calibration:
        table.add_row(f"{one.heat:.3f}", f"{one.share_used:.3f}", f"{one.num_blocks:,}")
    return table
