"""Measures what the manager itself costs: tables, keys and policies, without moving a byte.

    python benchmarks/metadata.py [--json FILE] [--repeats 7] [--sequences 128] [--tokens 32768] [--rows 1000000]

The table has as many rows as a large installation. Medians over the repeats. Where there is a floor that no
implementation on this machine can beat it is measured in the same run: hashing alone for lookups, one exponential per
row for the refresh of heat, one read of a column for the search of victims.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from dflash2.cache.manager import CacheManager, CacheSettings
from dflash2.cache.rebalance import Rebalancer, Watermarks
from dflash2.cache.sequence import Sequence
from dflash2.policy.heat import HeatPolicy
from dflash2.pools.null import NullPool
from dflash2.table.keys import KeyNamespace
from dflash2.table.page_table import PageTable
from dflash2.transfer.inline import InlineTransferEngine
from dflash2.types import IntArray, KVLayout, Tier

BLOCK = 128
NAMESPACE = KeyNamespace(model="none", weights_version="0", dtype="bfloat16", block_size=BLOCK)
LAYOUT = KVLayout(num_layers=1, num_kv_heads=1, head_dim=1, block_size=BLOCK, dtype="bfloat16")


@dataclass(frozen=True)
class Row:
    """One line of the result."""

    what: str
    ms: float
    per_second: float | None = None
    """Operations per second, where the operation is a single block."""
    limit_ms: float | None = None
    """The floor, measured in the same run."""


class Bench:
    """A manager over pools that hold no bytes, HBM filled with resident sequences.

    Args:
        num_sequences: resident, all of the same length.
        num_tokens: of each.
        num_rows: rows of the page table.
    """

    def __init__(self, num_sequences: int, num_tokens: int, num_rows: int) -> None:
        self.now = 1_000.0
        blocks = num_sequences * (num_tokens // BLOCK)
        hbm = int(1.25 * blocks) + 2 * num_sequences
        sizes = {Tier.HBM: hbm, Tier.DRAM: max(1, num_rows - hbm)}
        pools = {tier: NullPool(tier, count, LAYOUT) for tier, count in sizes.items()}
        self.table = PageTable(sizes)
        self.cache = CacheManager(
            self.table,
            HeatPolicy(hbm, 0.8),
            InlineTransferEngine(pools),
            CacheSettings(BLOCK, LAYOUT.block_bytes, batch_blocks=32, prefetch_window=4),
            lambda old, new: None,
        )
        self.rebalancer = Rebalancer(self.cache, Watermarks(0.95, 0.9), 1e9, None)
        rng = np.random.default_rng(0)
        self.prompts = [rng.integers(0, 50_000, num_tokens, dtype=np.int32) for _ in range(num_sequences)]
        self.sequences = [self._resident(number, prompt) for number, prompt in enumerate(self.prompts)]

    def _resident(self, number: int, prompt: IntArray) -> Sequence:
        sequence = self.cache.open(str(number), NAMESPACE.root(), prompt, 0.0)
        assert self.cache.residency.try_enter(sequence, len(prompt), self.now)
        assert self.cache.residency.try_grow(sequence, len(prompt), self.now)
        self.cache.advance(sequence, prompt)
        return sequence

    def decode_step(self) -> None:
        """One token more for every sequence, and what runs between steps."""
        token = np.zeros(1, np.int32)
        self.now += 0.02
        for sequence in self.sequences:
            assert self.cache.residency.try_extend(sequence, 1)
            assert self.cache.residency.try_grow(sequence, 1, self.now)
        for sequence in self.sequences:
            self.cache.advance(sequence, token)
        self.cache.mover.poll(self.now)
        self.rebalancer.run(np.empty(0, np.int32), self.now)

    def scan(self) -> None:
        """Rebalancing above the high watermark while nothing is cold: the whole table is looked at in vain."""
        self.rebalancer.watermarks = Watermarks(0.1, 0.05)
        self.rebalancer.run(np.empty(0, np.int32), self.now)
        self.rebalancer.watermarks = Watermarks(0.95, 0.9)


def median_ms(call: Callable[[], object], repeats: int, times: int = 1) -> float:
    spans = []
    for _ in range(repeats):
        start = time.perf_counter()
        for _ in range(times):
            call()
        spans.append((time.perf_counter() - start) / times)
    return 1e3 * statistics.median(spans)


def measure(bench: Bench, repeats: int) -> list[Row]:
    table = bench.table
    return [
        Row(f"decode step, {len(bench.sequences)} sequences resident", median_ms(bench.decode_step, repeats, 20)),
        Row(
            f"rebalance with nothing cold, {table.num_rows} rows",
            median_ms(bench.scan, repeats, 3),
            limit_ms=median_ms(lambda: np.flatnonzero(table.present & 1), repeats, 3),
        ),
        _lookup(bench, repeats),
        _refresh(bench, repeats),
        _turn(bench, repeats),
    ]


def _lookup(bench: Bench, repeats: int) -> Row:
    prompt = bench.prompts[0]
    root = NAMESPACE.root()
    num_blocks = len(bench.cache.peek(root, prompt))
    assert num_blocks >= len(prompt) // BLOCK - 1

    def hash_only() -> None:
        for start in range(0, len(prompt) - BLOCK, BLOCK):
            hashlib.blake2b(prompt[start : start + BLOCK].tobytes(), digest_size=32).digest()

    ms = median_ms(lambda: bench.cache.peek(root, prompt), repeats, 3)
    return Row(
        f"lookup of a prompt of {num_blocks} cached blocks", ms, 1e3 * num_blocks / ms, median_ms(hash_only, repeats, 3)
    )


def _refresh(bench: Bench, repeats: int) -> Row:
    """All rows in use: the free ones are filled with blocks that nobody holds."""
    table, policy = bench.table, bench.cache.policy
    ids = table.try_allocate(table.num_free_rows)
    assert ids is not None
    table.last_use[ids] = np.linspace(0.0, bench.now, len(ids))
    table.use_count[ids] = 1.0
    ages = np.linspace(-5.0, 0.0, table.num_rows)
    row = Row(
        f"heat refresh, {table.num_rows} rows in use",
        median_ms(lambda: policy.refresh(table, bench.now), repeats),
        limit_ms=median_ms(lambda: np.exp(ages), repeats),
    )
    table.free(ids)
    return row


def _turn(bench: Bench, repeats: int) -> Row:
    """A sequence leaves and enters again, all of it still in HBM."""
    sequence = bench.sequences[0]

    def turn() -> None:
        bench.cache.residency.leave(sequence, bench.now)
        assert bench.cache.residency.try_enter(sequence, 1, bench.now)

    return Row(f"one sequence of {len(sequence.block_ids)} blocks leaves and enters", median_ms(turn, repeats, 5))


def show(rows: list[Row]) -> str:
    lines = [f"{'what':<52} {'ms':>10} {'limit ms':>10} {'per second':>12}"]
    for row in rows:
        limit = "" if row.limit_ms is None else f"{row.limit_ms:.3f}"
        rate = "" if row.per_second is None else f"{row.per_second:,.0f}"
        lines.append(f"{row.what:<52} {row.ms:>10.3f} {limit:>10} {rate:>12}")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the result there")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--sequences", type=int, default=128)
    parser.add_argument("--tokens", type=int, default=32_768, help="per sequence")
    parser.add_argument("--rows", type=int, default=1_000_000, help="of the page table")
    arguments = parser.parse_args()
    bench = Bench(arguments.sequences, arguments.tokens, arguments.rows)
    rows = measure(bench, arguments.repeats)
    print(show(rows))
    print(f"page table: {bench.table.bytes_per_row} bytes a row")
    if arguments.json is not None:
        result = {
            "benchmark": "metadata",
            "bytes_per_row": bench.table.bytes_per_row,
            "rows": [asdict(row) for row in rows],
        }
        arguments.json.write_text(json.dumps(result, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
