"""What is replayed against ``dflash2 serve``, how, and what is made of it. For ``serving.py``."""

from __future__ import annotations

import asyncio
import csv
import json
import random
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import httpx

from dflash2.bench.client import ChatClient, Sample, first_model

START_S = 120.0
"""How long a server may take to load its model."""
PATIENCE_S = 180.0
"""How long one variant may take."""
TEMPLATE_TOKENS = 40
"""What the chat's template adds to a prompt, about."""
WORDS = ("the", "cat", "sat", "on", "mat", "and", "looked", "at", "seven", "blue", "boats", "under", "old", "tree")


@dataclass(frozen=True)
class Planned:
    """One request: when it is sent, how long its prompt and its answer are."""

    at_s: float
    prompt_tokens: int
    output_tokens: int


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
    hidden_share: float
    """Of the time of validating and tokenising, what passed while the model was running."""
    assemble_share: float
    """Time to put steps together, admission included, as a share of the run."""


def burst(count: int, scale: float, seed: int = 0) -> list[Planned]:
    """All at once; 50 to 6,000 tokens evenly over the orders of magnitude, divided by ``scale``."""
    rng = random.Random(seed)
    totals = [50.0, 6000.0, *(50 * 120 ** rng.random() for _ in range(count - 2))]
    rng.shuffle(totals)
    scaled = [round(total / scale) for total in totals]
    answers = [max(2, round(total * rng.uniform(0.05, 0.2))) for total in scaled]
    return [Planned(0.0, max(4, total - answer), answer) for total, answer in zip(scaled, answers, strict=True)]


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


@contextmanager
def served(model: str, config: dict[str, Any], context: int) -> Iterator[str]:
    """A server of its own with this configuration; its address."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "config.json")
        file.write_text(json.dumps(config), encoding="utf-8")
        log = Path(folder, "log")
        command = [sys.executable, "-m", "dflash2", "serve", "--model", model, "--config", str(file)]
        command += ["--port", "0", "--max-context", str(context), "--shutdown-grace-s", "1"]
        with log.open("w", encoding="utf-8") as output:
            process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
        try:
            yield _address(process, log)
        finally:
            process.terminate()
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _address(process: subprocess.Popen[bytes], log: Path) -> str:
    for _ in range(round(START_S / 0.2)):  # looks, not a deadline: all of this may be stopped and continued
        if process.poll() is not None:
            break
        found = re.search(r"serving .* on (http://\S+)", log.read_text(encoding="utf-8"))
        if found:
            return found[1]
        time.sleep(0.2)
    sys.exit(f"the server did not start:\n{log.read_text(encoding='utf-8')[-3000:]}")


async def replay(url: str, plan: Sequence[Planned]) -> tuple[list[Sample], dict[str, Any]]:
    """Send every request at its time and wait for all; the samples in the order of the plan, and the statistics."""
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=url, timeout=PATIENCE_S, limits=limits) as http:
        model = await first_model(http)
        client = ChatClient(http, model, {"ignore_eos": True}, time.perf_counter())

        async def one(number: int, planned: Planned) -> Sample:
            await asyncio.sleep(planned.at_s)
            words = random.Random(number).choices(WORDS, k=planned.prompt_tokens)
            message = [{"role": "user", "content": " ".join(words)}]
            return (await client.ask(number, 0, message, planned.output_tokens))[0]

        samples = await asyncio.gather(*(one(number, planned) for number, planned in enumerate(plan)))
        stats: dict[str, Any] = (await http.get("/dflash2/stats")).json()
        return list(samples), stats


def judge(plan: Sequence[Planned], samples: Sequence[Sample], stats: dict[str, Any], short_tokens: float) -> Result:
    """Figures of one variant; short are requests below ``short_tokens``."""
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
    front = stats["pipeline"]["stages"].values()
    busy = sum(stage["busy_s"] for stage in front)
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
        hidden_share=sum(stage["hidden_s"] for stage in front) / busy if busy else 1.0,
        assemble_share=scheduler["stages"]["batch"]["busy_s"] / makespan,
    )


def configuration(
    plan: Sequence[Planned], oversubscription: float, quantum_tokens: int, changes: dict[str, Any]
) -> dict[str, Any]:
    """HBM for one part in ``oversubscription`` of the load, DRAM for all of it, and what the variant changes."""
    sizes = [planned.prompt_tokens + planned.output_tokens + TEMPLATE_TOKENS for planned in plan]
    token_bytes = 2 * 30 * 3 * 64 * 4  # the small model that this is meant for, in float32
    hbm_mb = max(4, int(max(1.1 * max(sizes), sum(sizes) / oversubscription) * token_bytes / 2**20) + 1)
    dram_mb = int(2 * sum(sizes) * token_bytes / 2**20) + 1
    config: dict[str, Any] = {
        "enable": True,
        "memory": {"hbm_capacity_mb": hbm_mb, "dram_capacity_mb": dram_mb, "staging_buffer_size_mb": 16},
        "kv_block": {"block_size": 16},
        "scheduling": {"quantum_tokens": quantum_tokens},
    }
    for section, values in changes.items():
        config[section] = {**config.get(section, {}), **values}
    return config


def _quantile(ordered: Sequence[float], share: float) -> float:
    if len(ordered) < 2:
        return ordered[0] if ordered else 0.0
    return statistics.quantiles(ordered, n=100, method="inclusive")[round(share * 100) - 1]
