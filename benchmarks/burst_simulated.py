"""The burst of ``serving.py`` at full length, simulated.

The scheduler, admission, manager and policy are the real ones; the model and the copies only take time, on a clock
moved by hand. No timing of this machine is in it.

    python benchmarks/burst_simulated.py [--seed 0] [--json FILE]

64 requests of 50 to 6,000 tokens at once, a 72B model's blocks, 20 GB/s each way, HBM for a quarter, DRAM for the rest.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).parents[1]))  # the simulation belongs to the tests

from tests.fakes.burst import Case, Outcome, burst_lengths, run_burst

CASES = {
    "full": Case(timeout_s=60.0),
    "smoothing off": Case(smoothing=False, timeout_s=60.0),
    "first come": Case(smoothing=False, short_first=False, timeout_s=60.0),
}


def figures(one: Outcome) -> dict[str, float]:
    ttft, ends, gaps = (list(values.values()) for values in (one.ttft_s, one.finished_s, one.gap_s))
    scheduler = one.stats["scheduler"]
    return {
        "swapped GB": one.swap_bytes / 1e9,
        "makespan s": one.makespan_s,
        "tokens/s": one.num_tokens / one.makespan_s,
        "TTFT p50 s": float(np.quantile(ttft, 0.5)),
        "TTFT p99 s": float(np.quantile(ttft, 0.99)),
        "TTFT p99 short s": one.ttft_of_short(200),
        "mean end s": float(np.mean(ends)),
        "longest ends s": one.finished_s[one.longest],
        "pause p50 s": float(np.quantile(gaps, 0.5)),
        "pause max s": max(gaps),
        "unplanned": scheduler["unplanned_swaps"] + scheduler["growth_waits"] + scheduler["preemptions_recomputed"],
        "failed": len(one.size) - len(one.finished_s),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    results = {}
    table = Table(title="simulated: in brackets the ratio of full to this variant")
    for name, case in CASES.items():
        results[name] = figures(run_burst(burst_lengths(args.seed), case))
    for title in ("", *results):
        table.add_column(title, justify="right")
    for field, value in results["full"].items():
        others = [one[field] for name, one in results.items() if name != "full"]
        cells = (f"{one:.2f}" + (f" ({value / one:.2f})" if one else "") for one in others)
        table.add_row(field, f"{value:.2f}", *cells)
    Console(width=120).print(table)
    if args.json:
        args.json.write_text(json.dumps(results, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
