"""What is replayed against ``dflash2 serve``, with which configuration, and what is made of it. For ``serving.py``."""

from __future__ import annotations

import csv
import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from serving_client import Planned, Replayed


@dataclass(frozen=True)
class Result:
    """What one variant did."""

    makespan_s: float
    output_tokens_per_s: float
    ttft_p50_s: float
    ttft_p99_s: float
    ttft_p99_short_s: float
    longest_s: float
    num_failed: int
    swap_bytes: int
    mean_end_s: float
    num_unplanned: int
    """Swaps and waits of admitted requests that were not planned: in the middle of a turn, or for room to grow."""
    recomputed_tokens: int
    admission_wait_s: float
    """All requests together, before they had their reservations."""
    hidden_share: float | None
    """Of the time of validating and tokenising since the first token came, what passed while the model was running.

    None where nothing was tokenised any more."""
    assemble_share: float
    """Time to put steps together, admission included, as a share of the run."""
    prompt_tokens_off: int
    """Prompt tokens that the server counted beyond those planned, or short of them; all requests together."""
    ttft_by_size: list[tuple[int, float]]
    """Planned tokens and seconds to the first token, the shortest request first."""


def burst(count: int, scale: float, seed: int = 0) -> list[Planned]:
    """All at once; 50 to 6,000 tokens evenly over the orders of magnitude, divided by ``scale``."""
    rng = random.Random(seed)
    totals = [50.0, 6000.0, *(50 * 120 ** rng.random() for _ in range(count - 2))]
    rng.shuffle(totals)
    scaled = [round(total / scale) for total in totals]
    answers = [max(2, round(total * rng.uniform(0.05, 0.2))) for total in scaled]
    return [Planned(0.0, max(4, total - answer), answer) for total, answer in zip(scaled, answers, strict=True)]


def steady(count: int, seed: int = 0) -> list[Planned]:
    """For clients that always have a request open: prompts of 60 to 360 tokens, answers of 4 to 24."""
    rng = random.Random(seed)
    return [Planned(0.0, rng.randint(60, 360), rng.randint(4, 24)) for _ in range(count)]


def trace(path: Path, count: int, largest: int, speed: float) -> list[Planned]:
    """The first requests of one of Azure's LLM inference traces (TIMESTAMP, ContextTokens, GeneratedTokens).

    Args:
        path: the CSV file.
        count: requests.
        largest: all lengths are scaled alike, so that the longest request has so many tokens.
        speed: arrival times are divided by it.
    """
    with path.open(newline="", encoding="utf-8") as file:
        rows = [row for row, _ in zip(csv.DictReader(file), range(count), strict=False)]
    times = [datetime.fromisoformat(row["TIMESTAMP"][:26]) for row in rows]
    lengths = [(int(row["ContextTokens"]), int(row["GeneratedTokens"])) for row in rows]
    scale = min(1.0, largest / max(prompt + answer for prompt, answer in lengths))
    return [
        Planned((at - times[0]).total_seconds() / speed, max(8, round(prompt * scale)), max(2, round(answer * scale)))
        for at, (prompt, answer) in zip(times, lengths, strict=True)
    ]


def judge(plan: Sequence[Planned], replayed: Replayed, short_tokens: float) -> Result:
    """Figures of one variant; short are requests below ``short_tokens``."""
    samples, stats = replayed.samples, replayed.end
    good = [sample for sample in samples if not sample.error]
    ttft = sorted(sample.ttft_s for sample in good if sample.ttft_s is not None)
    sizes = [planned.prompt_tokens + planned.output_tokens for planned in plan]
    short = [
        sample.ttft_s
        for sample, size in zip(samples, sizes, strict=True)
        if size < short_tokens and sample.ttft_s is not None
    ]
    longest = samples[sizes.index(max(sizes))]
    makespan = max(sample.end_s for sample in samples)
    counters, scheduler = stats["counters"], stats["scheduler"]
    taken = _front_s(stats, "busy_s") - _front_s(replayed.busy, "busy_s")
    hidden = _front_s(stats, "hidden_s") - _front_s(replayed.busy, "hidden_s")
    return Result(
        makespan_s=makespan,
        output_tokens_per_s=sum(sample.output_tokens for sample in good) / makespan,
        ttft_p50_s=_quantile(ttft, 0.5),
        ttft_p99_s=_quantile(ttft, 0.99),
        ttft_p99_short_s=_quantile(sorted(short), 0.99),
        longest_s=longest.end_s - longest.start_s,
        num_failed=len(samples) - len(good),
        swap_bytes=counters["swap_in_bytes"] + counters["swap_out_bytes"],
        mean_end_s=statistics.fmean(sample.end_s - sample.start_s for sample in samples),
        num_unplanned=sum(
            scheduler[name] for name in ("unplanned_swaps", "growth_waits", "preemptions_recomputed", "load_timeouts")
        ),
        admission_wait_s=scheduler["stages"]["reserved"]["wait_s"],
        recomputed_tokens=counters["recomputed_tokens"],
        hidden_share=hidden / taken if taken else None,
        assemble_share=scheduler["stages"]["batch"]["busy_s"] / makespan,
        prompt_tokens_off=sum(
            abs(sample.prompt_tokens - planned.prompt_tokens)
            for sample, planned in zip(samples, plan, strict=True)
            if not sample.error
        ),
        ttft_by_size=sorted(
            (size, round(sample.ttft_s, 3))
            for sample, size in zip(samples, sizes, strict=True)
            if sample.ttft_s is not None
        ),
    )


def _front_s(stats: dict[str, Any], figure: str) -> float:
    """Seconds of all stages in front of the engine together."""
    return sum(stage[figure] for stage in stats["pipeline"]["stages"].values())


def configuration(
    plan: Sequence[Planned],
    oversubscription: float,
    quantum_tokens: int,
    changes: dict[str, Any],
    block_tokens: int = 16,
) -> dict[str, Any]:
    """HBM for one part in ``oversubscription`` of the load, DRAM for all of it, and what the variant changes."""
    sizes = [planned.prompt_tokens + planned.output_tokens for planned in plan]
    token_bytes = 2 * 30 * 3 * 64 * 4  # the small model that this is meant for, in float32
    hbm_mb = max(4, int(max(1.1 * max(sizes), sum(sizes) / oversubscription) * token_bytes / 2**20) + 1)
    dram_mb = int(2 * sum(sizes) * token_bytes / 2**20) + 1
    config: dict[str, Any] = {
        "enable": True,
        "memory": {"hbm_capacity_mb": hbm_mb, "dram_capacity_mb": dram_mb, "staging_buffer_size_mb": 16},
        "kv_block": {"block_size": block_tokens},
        "scheduling": {"quantum_tokens": quantum_tokens},
    }
    for section, values in changes.items():
        config[section] = {**config.get(section, {}), **values}
    return config


def _quantile(ordered: Sequence[float], share: float) -> float:
    if len(ordered) < 2:
        return ordered[0] if ordered else 0.0
    return statistics.quantiles(ordered, n=100, method="inclusive")[round(share * 100) - 1]
