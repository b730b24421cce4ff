"""A line that says how a run is going."""

from __future__ import annotations

from types import TracebackType

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from dflash2.bench.load import Run

RECENT = 50
"""Requests that the median is of."""


class Watcher:
    """Shown while the load runs.

    Args:
        console: where.
        num_requests: how many there will be, if none fails.
    """

    def __init__(self, console: Console, num_requests: int) -> None:
        columns = (BarColumn(24), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
        self._progress = Progress(*columns, console=console)
        self._task = self._progress.add_task("starting", total=num_requests)

    def __enter__(self) -> Watcher:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()

    def show(self, run: Run) -> None:
        """Bring the line up to date."""
        waits = [sample.ttft_s for sample in run.samples[-RECENT:] if sample.ttft_s is not None]
        failed = sum(bool(sample.error) for sample in run.samples)
        parts = [f"{run.num_running} running"]
        parts += [f"TTFT {float(np.median(waits)):.2f} s"] if waits else []
        parts += [f"{failed} failed"] if failed else []
        if run.activity:
            last = run.activity[-1]
            parts.append(f"swapped in {last['swap_in_blocks']:.0f}, out {last['swap_out_blocks']:.0f} blocks")
        self._progress.update(self._task, completed=len(run.samples), description=", ".join(parts))
