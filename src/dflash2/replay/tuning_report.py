"""What tuning found, as table, picture and JSON."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from dflash2.config import Config
from dflash2.replay.plots import save_figure
from dflash2.replay.tuning import Outcome, trade_off

MOST_ROWS = 12


def tuning_table(outcomes: Sequence[Outcome], chosen: Outcome) -> Table:
    """The base, what is best, and the trade-off between the figures.

    Args:
        outcomes: the base first.
        chosen: one of them.
    """
    table = Table(title=f"{len(outcomes)} settings tried")
    headings = ("", "cold", "window", "batch", "DRAM GiB", "NVMe GiB", "found %", "NVMe GB/h", "TTFT ms", "p99")
    for heading in headings:
        table.add_column(heading, justify="right")
    table.add_row("now", *_cells(outcomes[0]))
    table.add_row("best", *_cells(chosen), style="bold", end_section=True)
    others = [one for one in trade_off(outcomes) if one is not chosen and one is not outcomes[0]]
    for one in others[:MOST_ROWS]:
        table.add_row("", *_cells(one))
    return table


def tuning_json(trace: str, outcomes: Sequence[Outcome], chosen: Outcome) -> dict[str, Any]:
    """Every trial; the base first."""
    return {"trace": trace, "best": _document(chosen), "trials": [_document(one) for one in outcomes]}


def plot_tuning(outcomes: Sequence[Outcome], chosen: Outcome, path: Path) -> None:
    """Hit ratio over writes to NVMe, coloured by modelled TTFT.

    Raises:
        StorageError, RequestError: see ``save_figure``.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    points = axes.scatter(
        [one.nvme_bytes_per_hour / 1e9 for one in outcomes],
        [100 * one.hit_ratio for one in outcomes],
        c=[1e3 * one.ttft_mean_s for one in outcomes],
        cmap="viridis_r",
    )
    figure.colorbar(points, ax=axes, label="modelled TTFT, mean, ms")
    for one, name in ((outcomes[0], "now"), (chosen, "best")):
        axes.annotate(
            name,
            (one.nvme_bytes_per_hour / 1e9, 100 * one.hit_ratio),
            xytext=(8, 8),
            textcoords="offset points",
            arrowprops={"arrowstyle": "-"},
        )
    axes.set_xlabel("written to NVMe, GB per hour")
    axes.set_ylabel("found at arrival, % of block references")
    axes.grid(visible=True, alpha=0.3)
    save_figure(figure, path)


def _cells(one: Outcome) -> list[str]:
    config = one.config
    return [
        f"{config.policy.cold_threshold:.2f}",
        str(config.kv_block.prefetch_window),
        str(config.policy.swap_batch_size),
        f"{(config.memory.dram_capacity_mb or 0) / 1024:.1f}",
        f"{config.memory.nvme_capacity_mb / 1024:.1f}",
        f"{100 * one.hit_ratio:.2f}",
        f"{one.nvme_bytes_per_hour / 1e9:.0f}",
        f"{1e3 * one.ttft_mean_s:.0f}",
        f"{1e3 * one.ttft_p99_s:.0f}",
    ]


def _document(one: Outcome) -> dict[str, Any]:
    return {
        "config": changed_values(one.config),
        "prefix_hit_ratio": one.hit_ratio,
        "nvme_bytes_written_per_hour": one.nvme_bytes_per_hour,
        "modelled_ttft_ms": {"mean": 1e3 * one.ttft_mean_s, "p99": 1e3 * one.ttft_p99_s},
    }


def changed_values(config: Config) -> dict[str, Any]:
    """What is written in the file: what was set, not the defaults."""
    return config.model_dump(exclude_none=True, exclude_unset=True)
