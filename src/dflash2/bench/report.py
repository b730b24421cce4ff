"""What a run comes to: a table, JSON, and a plot of TTFT over time with the swaps beside it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from rich.table import Table

from dflash2.bench.load import COUNTED, Run
from dflash2.errors import DFlash2Error

PERCENTILES = (50, 90, 99)


def summary(run: Run) -> dict[str, Any]:
    """As JSON. Percentiles are of the requests that succeeded; times in seconds."""
    done = [sample for sample in run.samples if not sample.error]
    output = sum(sample.output_tokens for sample in done)
    prompt = sum(sample.prompt_tokens for sample in done)
    cached = sum(sample.cached_tokens for sample in done)
    last = run.activity[-1] if run.activity else {}
    return {
        "model": run.model,
        "wall_s": run.wall_s,
        "requests": len(run.samples),
        "failed": len(run.samples) - len(done),
        "errors": dict(Counter(sample.error for sample in run.samples if sample.error)),
        "prompt_tokens": prompt,
        "cached_tokens": cached,
        "cached_ratio": cached / prompt if prompt else 0.0,
        "output_tokens": output,
        "output_tokens_per_s": output / run.wall_s if run.wall_s else 0.0,
        "ttft_s": _spread([sample.ttft_s for sample in done]),
        "tpot_s": _spread([sample.tpot_s for sample in done]),
        "server": {name: last[name] for name in COUNTED} if last else None,
    }


def as_json(run: Run, settings: dict[str, Any]) -> dict[str, Any]:
    """The summary with everything it was made from."""
    samples = [{**asdict(sample), "ttft_s": sample.ttft_s, "tpot_s": sample.tpot_s} for sample in run.samples]
    return {"settings": settings, **summary(run), "samples": samples, "activity": run.activity}


def table(run: Run) -> Table:
    """The summary for people."""
    found = summary(run)
    shown = Table(
        title=f"{found['requests']} requests to {found['model']} in {found['wall_s']:.1f} s", title_justify="left"
    )
    shown.add_column("")
    for name in ("mean", *(f"{one} %" for one in PERCENTILES), "longest"):
        shown.add_column(name, justify="right")
    for name, key in (("time to first token (s)", "ttft_s"), ("time per output token (s)", "tpot_s")):
        shown.add_row(name, *(f"{value:.3f}" for value in found[key].values()))
    shown.add_section()
    rows = [
        ("output tokens per second", f"{found['output_tokens_per_s']:.1f}"),
        ("output tokens", f"{found['output_tokens']:,}"),
        ("prompt tokens, of these cached", f"{found['prompt_tokens']:,}, {found['cached_ratio']:.0%}"),
        ("failed requests", f"{found['failed']:,}"),
    ]
    for name, value in (found["server"] or {}).items():
        rows.append((f"server: {name.replace('_', ' ')}", f"{value:,.0f}"))
    for name, value in rows:
        shown.add_row(name, value)
    return shown


def plot(run: Run, path: Path) -> None:
    """TTFT of each request over time, and blocks swapped per second below it.

    Raises:
        DFlash2Error: matplotlib is not installed, or the file cannot be written.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise DFlash2Error("plots need matplotlib: pip install 'dflash2[bench]'") from error
    figure = Figure(figsize=(10, 6), layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=(3, 2))
    done = [sample for sample in run.samples if not sample.error and sample.ttft_s is not None]
    for turn in sorted({sample.turn for sample in done}):
        these = [sample for sample in done if sample.turn == turn]
        above.plot([one.start_s for one in these], [one.ttft_s for one in these], ".", label=f"turn {turn + 1}")
    failed = [sample.start_s for sample in run.samples if sample.error]
    if failed:
        above.plot(failed, [0.0] * len(failed), "x", color="tab:red", label="failed")
    above.set(ylabel="time to first token (s)", title=run.model)
    above.set_ylim(bottom=0)
    if done or failed:
        above.legend(ncols=4, fontsize="small")
    times = [row["time_s"] for row in run.activity]
    for name, label in (("swap_in_blocks", "in"), ("swap_out_blocks", "out")):
        below.step(times[1:], _per_second(times, [row[name] for row in run.activity]), where="pre", label=label)
    below.set(xlabel="seconds", ylabel="blocks swapped per second" if times else "the server tells of no swaps")
    if times:
        below.legend(fontsize="small")
    try:
        figure.savefig(path, dpi=120)
    except (OSError, ValueError) as error:
        raise DFlash2Error(f"cannot write the plot {path}: {error}") from error


def _per_second(times: Sequence[float], values: Sequence[float]) -> list[float]:
    return (np.diff(values) / np.diff(times)).tolist() if len(times) > 1 else []


def _spread(values: Sequence[float | None]) -> dict[str, float]:
    known = np.array([value for value in values if value is not None])
    if not len(known):
        return dict.fromkeys(("mean", *(f"p{one}" for one in PERCENTILES), "max"), 0.0)
    percentiles = {f"p{one}": float(np.percentile(known, one)) for one in PERCENTILES}
    return {"mean": float(known.mean()), **percentiles, "max": float(known.max())}
