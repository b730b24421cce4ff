"""Replays arrivals and lengths against ``dflash2 serve`` and compares what the front end and admission are worth.

    python benchmarks/serving.py --model MODEL.gguf [--workload burst|FILE.csv] [--requests 24] [--variants NAME ...]
                                 [--largest 400] [--speed 1.0] [--oversubscription 4] [--json FILE]

``burst`` sends all requests at once, with lengths evenly over the orders of magnitude up to ``--largest`` tokens. A CSV
file is one of Azure's LLM inference traces (TIMESTAMP, ContextTokens, GeneratedTokens): its arrival times are divided
by ``--speed`` and its lengths scaled so that the longest request has ``--largest`` tokens. HBM holds one part in
``--oversubscription`` of all requests together, DRAM the rest. Each variant differs from ``full`` in one setting and
gets a server of its own, with the same requests; compare them with ``full`` of the same run only.
"""

from __future__ import annotations

import argparse
import asyncio
import csv
import json
import random
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import httpx
from rich.console import Console
from rich.table import Table

from dflash2.bench.client import ChatClient, Sample, first_model

START_S = 300.0
"""How long a server may take to load its model."""
PATIENCE_S = 280.0
"""How long one variant may take."""
SHORT_TOKENS = 200
VARIANTS: dict[str, dict[str, Any]] = {
    "full": {},
    "pipeline off": {"pipeline": {"enabled": False}},
    "smoothing off": {"scheduling": {"smoothing": False}},
    "reservation off": {"scheduling": {"reserve": "prompt"}},
    "first come": {"scheduling": {"order": "first_come", "smoothing": False}},
}
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
    unplanned_swaps: int
    growth_waits: int
    recomputed_tokens: int
    hidden_share: float
    """Of the time of validating, tokenising and loading adapters, what passed while the model was running."""
    assemble_share: float
    """Time to put steps together, admission included, as a share of the run."""


def burst(count: int, largest: int, seed: int = 0) -> list[Planned]:
    """All at once; 1/120 of the largest to the largest, evenly over the orders of magnitude."""
    rng = random.Random(seed)
    totals = [round(largest * 120 ** (rng.random() - 1)) for _ in range(count - 1)] + [largest]
    rng.shuffle(totals)
    answers = [max(4, round(total * rng.uniform(0.05, 0.2))) for total in totals]
    return [Planned(0.0, max(8, total - answer), answer) for total, answer in zip(totals, answers, strict=True)]


def trace(path: Path, count: int, largest: int, speed: float) -> list[Planned]:
    """The first requests of an Azure trace, scaled."""
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
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline and process.poll() is None:
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


def judge(plan: Sequence[Planned], samples: Sequence[Sample], stats: dict[str, Any]) -> Result:
    """Figures of one variant."""
    good = [sample for sample in samples if not sample.error]
    ttft = sorted(sample.ttft_s for sample in good if sample.ttft_s is not None)
    sizes = [planned.prompt_tokens + planned.output_tokens for planned in plan]
    short_limit = min(SHORT_TOKENS, max(sizes) // 10)
    short = [
        sample.ttft_s
        for sample, size in zip(samples, sizes, strict=True)
        if size < short_limit and sample.ttft_s is not None
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
        unplanned_swaps=scheduler["unplanned_swaps"],
        growth_waits=scheduler["growth_waits"],
        recomputed_tokens=counters["recomputed_tokens"],
        hidden_share=sum(stage["hidden_s"] for stage in front) / busy if busy else 1.0,
        assemble_share=scheduler["stages"]["batch"]["busy_s"] / makespan,
    )


def configuration(plan: Sequence[Planned], oversubscription: float, changes: dict[str, Any]) -> dict[str, Any]:
    """HBM for one part in ``oversubscription`` of the load, and what the variant changes."""
    tokens = sum(planned.prompt_tokens + planned.output_tokens + 40 for planned in plan)  # 40: the chat's template
    largest = max(planned.prompt_tokens + planned.output_tokens + 72 for planned in plan)
    token_bytes = 2 * 30 * 3 * 64 * 4  # the small model that this is meant for, in float32
    hbm_mb = max(4, int(max(largest, tokens / oversubscription) * token_bytes / 2**20) + 1)
    config: dict[str, Any] = {
        "enable": True,
        "memory": {"hbm_capacity_mb": hbm_mb, "dram_capacity_mb": 8 * hbm_mb, "staging_buffer_size_mb": 16},
        "kv_block": {"block_size": 16},
        "scheduling": {"quantum_tokens": 8, "admission_timeout_s": PATIENCE_S},
    }
    for section, values in changes.items():
        config[section] = {**config.get(section, {}), **values}
    return config


def show(results: dict[str, Result]) -> None:
    table = Table(title="each variant against full")
    for title in ("variant", "makespan", "tok/s", "TTFT p50", "TTFT p99", "p99 short", "longest", "swapped"):
        table.add_column(title, justify="left" if title == "variant" else "right")
    for title in ("failed", "unplanned", "hidden", "assemble"):
        table.add_column(title, justify="right")
    full = results.get("full")
    for name, one in results.items():
        values = [name]
        for field, form in (
            ("makespan_s", "{:.1f} s"),
            ("output_tokens_per_s", "{:.1f}"),
            ("ttft_p50_s", "{:.2f} s"),
            ("ttft_p99_s", "{:.2f} s"),
            ("ttft_p99_short_s", "{:.2f} s"),
            ("longest_s", "{:.1f} s"),
            ("swap_bytes", "{:.3g} B"),
        ):
            value = getattr(one, field)
            text = form.format(value)
            base = getattr(full, field) if full is not None and full is not one else 0
            values.append(f"{text} ({value / base:.2f})" if base else text)
        values += [str(one.num_failed), str(one.unplanned_swaps + one.growth_waits)]
        table.add_row(*values, f"{one.hidden_share:.1%}", f"{one.assemble_share:.1%}")
    Console(width=180).print(table)


def _quantile(ordered: Sequence[float], share: float) -> float:
    if len(ordered) < 2:
        return ordered[0] if ordered else 0.0
    return statistics.quantiles(ordered, n=100, method="inclusive")[round(share * 100) - 1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--workload", default="burst")
    parser.add_argument("--requests", type=int, default=24)
    parser.add_argument("--largest", type=int, default=400)
    parser.add_argument("--speed", type=float, default=1.0)
    parser.add_argument("--oversubscription", type=float, default=4.0)
    parser.add_argument("--variants", nargs="+", choices=tuple(VARIANTS), default=list(VARIANTS))
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the server ends too
    if args.workload == "burst":
        plan = burst(args.requests, args.largest)
    else:
        plan = trace(Path(args.workload), args.requests, args.largest, args.speed)
    context = 2 * max(planned.prompt_tokens + planned.output_tokens for planned in plan) + 64
    results: dict[str, Result] = {}
    for name in args.variants:
        config = configuration(plan, args.oversubscription, VARIANTS[name])
        with served(args.model, config, context) as url:
            samples, stats = asyncio.run(replay(url, plan))
        results[name] = judge(plan, samples, stats)
        print(name, json.dumps(asdict(results[name])), file=sys.stderr, flush=True)
        for error in {sample.error for sample in samples if sample.error}:
            print(f"{name}: {error}", file=sys.stderr)
    show(results)
    if args.json:
        document = {"settings": vars(args) | {"json": str(args.json)}, "plan": [asdict(one) for one in plan]}
        document["results"] = {name: asdict(one) for name, one in results.items()}
        args.json.write_text(json.dumps(document, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
