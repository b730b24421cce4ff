"""Pictures of results; needs matplotlib, of the extra ``replay``."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from dflash2.errors import RequestError, StorageError
from dflash2.replay.report import size_text
from dflash2.replay.results import Result
from dflash2.replay.sizes import is_single

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

ENOUGH_BLOCKS = 1000
"""Tenths of heat with fewer blocks are drawn hollow: chance has too much part in them."""


def check_plotting() -> None:
    """Raises:
    RequestError: matplotlib is not installed.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise RequestError("plots need matplotlib; pip install 'dflash2[replay]'", "--plot")


def save_figure(figure: Figure, path: Path) -> None:
    """Write a picture in the format that its name says.

    Raises:
        StorageError: it cannot be written.
        RequestError: the format is not known.
    """
    try:
        figure.savefig(path, dpi=150)
    except OSError as error:
        raise StorageError(f"cannot write {path}: {error.strerror or error}") from error
    except ValueError as error:
        raise RequestError(f"cannot draw {path}: {error}", "--plot") from error


def plot_results(results: Sequence[Result], path: Path) -> None:
    """Hit ratio over size on the left, reliability of heat on the right.

    Raises:
        StorageError, RequestError: see ``save_figure``.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 5), layout="constrained")
    ratios, reliability = figure.subplots(1, 2)
    _draw_ratios(ratios, results)
    _draw_reliability(reliability, results)
    save_figure(figure, path)


def _draw_ratios(axes: Axes, results: Sequence[Result]) -> None:
    by_policy: dict[str, list[Result]] = {}
    for result in results:
        by_policy.setdefault(result.policy, []).append(result)
    for policy, some in by_policy.items():
        some.sort(key=lambda result: result.capacity_blocks)
        sizes = [result.capacity_blocks for result in some]
        ratios = [100 * result.outcomes.prefix_hit_ratio for result in some]
        axes.plot(sizes, ratios, marker="o", label=policy, linestyle="--" if policy == "opt" else "-")
    axes.set_xscale("log")
    axes.set_xlabel("blocks" if all(is_single(result.slots) for result in results) else "blocks of all tiers")
    axes.set_ylabel("found at arrival, % of block references")
    axes.set_ylim(0, 100)
    axes.grid(visible=True, alpha=0.3)
    axes.legend()


def _draw_reliability(axes: Axes, results: Sequence[Result]) -> None:
    axes.plot([0, 1], [0, 1], color="grey", linewidth=1)
    axes.fill_between([0, 1], [-0.1, 0.9], [0.1, 1.1], color="grey", alpha=0.15, label="within 0.1")
    for result in results:
        bins = result.outcomes.calibration
        if result.policy != "heat" or not bins:
            continue
        heat, used = [one.heat for one in bins], [one.share_used for one in bins]
        (line,) = axes.plot(heat, used, linewidth=1)
        for one in bins:
            face = line.get_color() if one.num_blocks >= ENOUGH_BLOCKS else "white"
            axes.plot(one.heat, one.share_used, "o", color=line.get_color(), markerfacecolor=face)
        line.set_label(f"heat, {size_text(result)}")
    axes.set_xlim(0, 1)
    axes.set_ylim(0, 1)
    axes.set_xlabel("heat")
    axes.set_ylabel("share used within the horizon")
    axes.grid(visible=True, alpha=0.3)
    axes.legend(loc="upper left")
