"""What the demo found: one object, as JSON and as a table."""

from __future__ import annotations

from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from dflash2.demo.compare import Divergence
from dflash2.demo.play import Transcript
from dflash2.types import Tier

_ROWS = (
    ("output tokens/s", "output_tokens_per_s", "{:.1f}"),
    ("time to first token, median (s)", "ttft_p50_s", "{:.1f}"),
    ("time to first token, 99 % (s)", "ttft_p99_s", "{:.1f}"),
    ("whole run (s)", "wall_s", "{:.1f}"),
    ("recomputed tokens", "recomputed_tokens", "{:,}"),
    ("requests swapped while running", "preemptions_swapped", "{:,}"),
    ("requests dropped while running", "preemptions_recomputed", "{:,}"),
    ("blocks swapped in / out", ("swap_in_blocks", "swap_out_blocks"), "{:,} / {:,}"),
    ("prompt tokens found in HBM / DRAM / NVMe", "hits_by_tier", "{hbm:,} / {dram:,} / {nvme:,}"),
    ("KV of running requests, peak (MB)", "peak_running_kv_bytes", "{:.0f}"),
    ("HBM pool (MB)", "hbm_pool_bytes", "{:.0f}"),
    ("DRAM pool (MB)", "dram_pool_bytes", "{:.0f}"),
    ("NVMe pool (MB)", "nvme_pool_bytes", "{:.0f}"),
)


def setting_result(
    transcript: Transcript, stats: dict[str, Any], bytes_per_token: int, working_set_tokens: int
) -> dict[str, Any]:
    """The figures of one setting.

    Args:
        transcript: what it answered.
        stats: ``ReferenceEngine.stats()`` after the last token.
        bytes_per_token: KV of one token.
        working_set_tokens: tokens of all conversations at their end.
    """
    counters, scheduler = stats["counters"], stats["scheduler"]
    return {
        "output_tokens": transcript.num_output_tokens,
        "output_tokens_per_s": transcript.num_output_tokens / transcript.wall_s,
        "wall_s": transcript.wall_s,
        "ttft_p50_s": float(np.percentile(transcript.ttft_s, 50)),
        "ttft_p99_s": float(np.percentile(transcript.ttft_s, 99)),
        "recomputed_tokens": counters["recomputed_tokens"],
        "preemptions_swapped": scheduler["preemptions_swapped"],
        "preemptions_recomputed": scheduler["preemptions_recomputed"],
        **{key: counters[key] for key in ("swap_in_blocks", "swap_out_blocks", "swap_in_bytes", "swap_out_bytes")},
        "hits_by_tier": {tier.label: counters[f"hit_tokens_{tier.label}"] for tier in Tier},
        **{f"{tier.label}_pool_bytes": stats["tiers"][tier.label]["pool_bytes"] for tier in Tier},
        "kv_working_set_bytes": working_set_tokens * bytes_per_token,
        "peak_running_kv_bytes": scheduler["peak_running_tokens"] * bytes_per_token,
    }


def print_table(console: Console, settings: dict[str, dict[str, Any]]) -> None:
    """One column a setting."""
    table = Table("", *settings, title="The same chats in three settings")
    for label, keys, form in _ROWS:
        table.add_row(label, *(_cell(result, keys, form) for result in settings.values()))
    console.print(table)
    ours, others = settings["dflash2"]["output_tokens_per_s"], ("recompute", "all_hbm")
    ratios = [f"{ours / settings[name]['output_tokens_per_s']:.2f} × {name}" for name in others]
    pressure = settings["dflash2"]["kv_working_set_bytes"] / settings["dflash2"]["hbm_pool_bytes"]
    console.print(f"KV working set {pressure:.1f} × the HBM pool; throughput of dflash2: {', '.join(ratios)}")


def print_verdict(console: Console, identical: bool, divergences: dict[str, list[Divergence]]) -> None:
    """Whether the answers are the same, and each place where they are not."""
    console.print("Answers identical in all settings: " + ("[green]yes[/]" if identical else "[red]no[/]"))
    for name, found in divergences.items():
        for each in found:
            console.print(
                f"  {name} parts from all_hbm in chat {each.chat}, turn {each.turn}, token {each.position}: "
                f"the two best logits there are {each.gap:.2e} apart"
            )


def _cell(result: dict[str, Any], keys: str | tuple[str, ...], form: str) -> str:
    values = [result[key] for key in ([keys] if isinstance(keys, str) else keys)]
    if isinstance(values[0], dict):
        return form.format(**values[0])
    if isinstance(keys, str) and keys.endswith("_bytes"):
        values = [value / 1e6 for value in values]
    return form.format(*values)
