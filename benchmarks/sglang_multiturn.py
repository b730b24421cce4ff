"""Conversations on SGLang: plain, with HiCache, and with DFlash2, on a CPU.

    python benchmarks/sglang_multiturn.py --python .venv-sglang/bin/python --model .models/plain --json out.json

Workloads: (a) chats about long documents with think times, their KV four times the device pool; (b) the same with 40 %
of requests that never return; (c) everything fits the device; (d) as (a) with half as much DRAM as device pool;
(s) SGLang's own ``bench_serving``, whose prompts share long heads.
DRAM is twice the device pool otherwise, disk sixteen times. Only ratios within one run mean anything. What is changed
in SGLang so that it can be compared on a CPU is in ``sglang_cpu/dflash2_bench_cpu.py``.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent))
from sglang_servers import SETTINGS, BenchServer, Sizes, start
from sglang_workloads import WORKLOADS, Round, moved, of_answers

T_95 = {2: 12.71, 3: 4.30, 4: 3.18, 5: 2.78, 6: 2.57, 7: 2.45, 8: 2.36, 9: 2.31, 10: 2.26}
T_95 |= {11: 2.23, 12: 2.20, 13: 2.18, 14: 2.16, 15: 2.14, 16: 2.13}
"""Student's t for a two-sided 95 % interval, by the number of pairs."""


def main() -> None:
    """Run it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--python", required=True, help="interpreter with SGLang")
    parser.add_argument("--model", required=True)
    parser.add_argument("--workload", choices=[*WORKLOADS, "s"], default="a")
    parser.add_argument("--settings", default=",".join(SETTINGS), help="comma-separated")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--threads", type=int, default=1, help="of each server")
    parser.add_argument("--keep", type=Path, help="folder for logs and files of the servers; else they are removed")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    sizes = replace(Sizes(), dram=Sizes().device // 2) if arguments.workload == "d" else Sizes()
    rows: list[dict[str, Any]] = []
    servers: list[BenchServer] = []
    with contextlib.ExitStack() as stack:
        place = arguments.keep or stack.enter_context(tempfile.TemporaryDirectory(prefix="dflash2-bench-"))
        try:
            for setting in arguments.settings.split(","):
                where = Path(place) / setting
                servers.append(start(setting, sizes, where, arguments.python, arguments.model, arguments.threads))
            for server in servers:
                server.wait()
            for server in servers:
                server.stop()
            for index in range(arguments.rounds):
                for server in servers if index % 2 == 0 else servers[::-1]:
                    rows.append(measure(server, arguments, index))
                    print(line(rows[-1]), flush=True)
        finally:
            for server in servers:
                server.kill()
    for text in pairs(rows):
        print(text)
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=1))


def measure(server: BenchServer, arguments: argparse.Namespace, index: int) -> dict[str, Any]:
    """One round of one setting."""
    name = arguments.workload
    with server.turn():
        before = server.written()
        if name == "s":
            found = bench_serving(server, arguments, index)
        else:
            answers, seconds = Round(server.port, WORKLOADS[name], seed=1000 * index).run()
            found = of_answers(answers, seconds)
        after = server.written()
    row = {"setting": server.setting, "workload": name, "round": index, "device_pool_tokens": server.device_tokens()}
    return row | found | moved(found["tokens_by_source"], before, after)


def bench_serving(server: BenchServer, arguments: argparse.Namespace, index: int) -> dict[str, Any]:
    """SGLang's own load generator: groups of prompts with a long common head, in random order."""
    output = server.place / f"bench_serving{index}.jsonl"
    command = [arguments.python, "-m", "sglang.bench_serving", "--backend", "sglang", "--host", "127.0.0.1"]
    command += ["--port", str(server.port), "--model", arguments.model, "--tokenizer", arguments.model]
    command += ["--dataset-name", "generated-shared-prefix", "--gsp-num-groups", "8", "--gsp-prompts-per-group", "4"]
    command += ["--gsp-system-prompt-len", "900", "--gsp-question-len", "32", "--gsp-output-len", "12"]
    command += ["--request-rate", "1", "--seed", str(index), "--warmup-requests", "0", "--disable-tqdm"]
    subprocess.run([*command, "--output-file", str(output)], check=True, stdout=subprocess.DEVNULL, timeout=600)
    said = json.loads(output.read_text().splitlines()[-1])
    return {
        "ttft_mean_s": said["mean_ttft_ms"] / 1000,
        "ttft_p50_s": said["median_ttft_ms"] / 1000,
        "ttft_p99_s": said["p99_ttft_ms"] / 1000,
        "ttft_first_mean_s": None,
        "ttft_returning_mean_s": None,
        "output_tokens_per_s": said["output_throughput"],
        "tokens_by_source": None,
    }


def line(row: dict[str, Any]) -> str:
    """One row of the table."""
    times = ("mean", "p50", "p99", "first_mean", "returning_mean")
    shown = " ".join(f"{name} {row[f'ttft_{name}_s'] or 0:.2f}" for name in times)
    sources = " ".join(f"{name} {tokens:.0f}" for name, tokens in (row["tokens_by_source"] or {}).items())
    return (
        f"{row['workload']} round {row['round']} {row['setting']:13s} TTFT {shown} s, "
        f"{row['output_tokens_per_s']:.1f} tok/s, reused {row.get('returning_reused_share', 0):.2f}; {sources}; "
        f"MB to DRAM {row['dram_bytes_written'] / 1e6:.0f}, disk {row['disk_bytes_written'] / 1e6:.0f}"
    )


def pairs(rows: list[dict[str, Any]]) -> list[str]:
    """Each setting against plain in the same rounds: relative difference of TTFT and of throughput, 95 % interval."""
    plain = {row["round"]: row for row in rows if row["setting"] == "plain"}
    found = []
    for setting in dict.fromkeys(row["setting"] for row in rows if row["setting"] != "plain"):
        own = {row["round"]: row for row in rows if row["setting"] == setting}
        both = sorted(own.keys() & plain.keys())
        if len(both) < 2:
            continue
        for name in ("ttft_mean_s", "output_tokens_per_s"):
            change = np.array([own[index][name] / plain[index][name] - 1 for index in both])
            half = T_95.get(len(both), 1.96) * change.std(ddof=1) / np.sqrt(len(both))
            found.append(
                f"{setting} against plain, {len(both)} pairs: {name} {100 * change.mean():+.1f} % "
                f"(95 % interval {100 * (change.mean() - half):+.1f} to {100 * (change.mean() + half):+.1f})"
            )
    return found


if __name__ == "__main__":
    main()
