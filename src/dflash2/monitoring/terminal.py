"""The statistics as a screen of text, for `dflash2 top`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.columns import Columns
from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from dflash2.monitoring.data_path import ROUTES
from dflash2.monitoring.numbers_in import TIERS, number_at
from dflash2.monitoring.pitfalls import BAD_HIT_RATE, WEAK_HIT_RATE

_UNITS = ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB"))
_BAR_WIDTH = 24


def screen(now: Mapping[str, Any], before: Mapping[str, Any] | None, source: str) -> RenderableType:
    """One picture of a server.

    Args:
        now: statistics as ``/dflash2/stats`` gives them.
        before: those of the last time, for rates; None the first time.
        source: where they are from, for the headline.
    """
    state = "enabled" if now.get("enabled") else "fallback: HBM only"
    if not number_at(now, ("server", "engine_up")) and "server" in now:
        state = "engine stopped"
    headline = Text.assemble(("DFlash2 ", "bold"), (state, "green" if state == "enabled" else "red"), f"  {source}")
    panels = [_hits(now), _queue(now), _swaps(now), _nvme(now), _host(now), _latency(now)]
    warnings = [Text(f"{one['id']}: {one['text']}", "yellow") for one in now.get("warnings", ())]
    return Group(headline, _tiers(now, before), Columns(panels, equal=True), *warnings)


def size(num_bytes: float) -> str:
    """Bytes for people, in powers of ten."""
    unit = next(((value, name) for value, name in _UNITS if num_bytes >= value), None)
    return f"{num_bytes:.0f} B" if unit is None else f"{num_bytes / unit[0]:.1f} {unit[1]}"


def _tiers(now: Mapping[str, Any], before: Mapping[str, Any] | None) -> Table:
    table = Table(expand=True, title="tiers and flows", title_justify="left")
    for name in ("tier", "used", "", "blocks", "bytes", "to the others", "from them"):
        table.add_column(name, justify="left" if name in ("tier", "") else "right")
    for tier in TIERS:
        used, capacity = (number_at(now, ("tiers", tier, f"{key}_blocks")) for key in ("used", "capacity"))
        away = sum(_rate(now, before, route) for route in ROUTES if route.startswith(f"{tier}_"))
        here = sum(_rate(now, before, route) for route in ROUTES if route.endswith(f"_{tier}"))
        table.add_row(
            tier.upper(),
            f"{used / capacity:.0%}" if capacity else "none",
            ProgressBar(total=max(1.0, capacity), completed=used, width=_BAR_WIDTH),
            f"{used:,.0f} of {capacity:,.0f}",
            f"{size(used * number_at(now, ('block_bytes',)))} of {size(number_at(now, ('tiers', tier, 'pool_bytes')))}",
            f"{size(away)}/s",
            f"{size(here)}/s",
        )
    return table


def _rate(now: Mapping[str, Any], before: Mapping[str, Any] | None, route: str) -> float:
    if before is None:
        return 0.0
    passed = number_at(now, ("time",)) - number_at(before, ("time",))
    path = ("transfer", "routes", route, "bytes")
    return max(0.0, number_at(now, path) - number_at(before, path)) / passed if passed > 0 else 0.0


def _hits(now: Mapping[str, Any]) -> Panel:
    rate, looked = number_at(now, ("hbm_hit_rate",)), _counter(now, "looked_up_tokens")
    colour = "green" if rate >= WEAK_HIT_RATE else "yellow" if rate >= BAD_HIT_RATE else "red"
    rows: list[tuple[str, RenderableType]] = [("in HBM when needed", Text(f"{rate:.2%}", colour))]
    for tier in TIERS:
        rows.append((f"prompt tokens from {tier.upper()}", _share(_counter(now, f"hit_tokens_{tier}"), looked)))
    return _panel("hit rates", rows)


def _queue(now: Mapping[str, Any]) -> Panel:
    names = ("waiting", "paused", "resident")
    rows = [(name, f"{number_at(now, ('scheduler', f'{name}_requests')):,.0f}") for name in names]
    rows += [(name, f"{number_at(now, (f'{name}_blocks',)):,.0f} blocks") for name in ("pinned", "reserved")]
    return _panel("queue and reservations", [*rows, ("refused", f"{_counter(now, 'reservations_refused'):,.0f}")])


def _swaps(now: Mapping[str, Any]) -> Panel:
    issued, used, late, wasted = (
        _counter(now, f"prefetch_{name}_blocks") for name in ("issued", "used", "late", "wasted")
    )
    return _panel(
        "swaps and prefetch",
        [
            ("blocks swapped in", f"{_counter(now, 'swap_in_blocks'):,.0f}"),
            ("blocks swapped out", f"{_counter(now, 'swap_out_blocks'):,.0f}"),
            ("recomputed tokens", f"{_counter(now, 'recomputed_tokens'):,.0f}"),
            ("failed copies", f"{_counter(now, 'failed_copies'):,.0f}"),
            ("prefetched", f"{issued:,.0f}, window {number_at(now, ('prefetch_window',)):.0f}"),
            ("used / late / wasted", f"{used:,.0f} / {late:,.0f} / {wasted:,.0f}"),
        ],
    )


def _nvme(now: Mapping[str, Any]) -> Panel:
    if not number_at(now, ("tiers", "nvme", "capacity_blocks")):
        return _panel("NVMe", [("tier", "none configured")])
    slow = number_at(now, ("transfer", "pressed"))
    health = "full" if not number_at(now, ("nvme", "healthy")) else "slow to write" if slow else "ok"
    return _panel(
        "NVMe",
        [
            ("health", Text(health, "green" if health == "ok" else "red")),
            ("load, mean", _mean(now, ("transfer", "nvme_loads"))),
            ("store, mean", _mean(now, ("transfer", "nvme_stores"))),
            ("checksum failures", f"{number_at(now, ('nvme', 'checksum_failures')):,.0f}"),
            ("disk free", size(number_at(now, ("disk", "free_bytes")))),
        ],
    )


def _host(now: Mapping[str, Any]) -> Panel:
    limit, left = (number_at(now, ("host", name)) for name in ("memory_limit_bytes", "headroom_bytes"))
    return _panel(
        "memory and policy",
        [
            ("headroom", f"{size(left)} of {size(limit)}"),
            ("staging in use", size(number_at(now, ("transfer", "staging_in_use_bytes")))),
            ("cold_threshold", f"{number_at(now, ('cold_threshold',)):g}"),
            ("in effect", f"{number_at(now, ('effective_threshold',)):.2f}"),
        ],
    )


def _latency(now: Mapping[str, Any]) -> Panel:
    names = {"queue": "in the queue", "ttft": "to first token", "tpot": "per output token"}
    return _panel(
        "latency, mean", [(name, _mean(now, ("latency", key), "count", "sum_s")) for key, name in names.items()]
    )


def _mean(now: Mapping[str, Any], path: tuple[str, ...], count: str = "jobs", total: str = "latency_sum_s") -> str:
    num = number_at(now, (*path, count))
    return f"{1000 * number_at(now, (*path, total)) / num:,.1f} ms" if num else "–"


def _counter(now: Mapping[str, Any], name: str) -> float:
    return number_at(now, ("counters", name))


def _share(part: float, whole: float) -> str:
    return f"{part / whole:.1%}" if whole else "–"


def _panel(title: str, rows: Sequence[tuple[str, RenderableType]]) -> Panel:
    table = Table.grid(padding=(0, 2), expand=True)
    table.add_column()
    table.add_column(justify="right")
    for name, value in rows:
        table.add_row(name, value)
    return Panel(table, title=title, title_align="left")
