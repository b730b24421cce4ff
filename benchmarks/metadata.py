"""Measures what the manager itself costs: tables, keys and policies, without moving a byte.

    python benchmarks/metadata.py [--json FILE] [--repeats 7] [--sequences 128] [--tokens 32768] [--rows 1000000]

The table has as many rows as a large installation, and for lookups and heat all of them are in use. The resident
sequences have different lengths, so that each decode step has as many that begin a new block as a running server has.
Medians over the repeats; the slowest hundredth of the steps apart. Where there is a floor that no implementation on
this machine can beat it is measured in the same run: hashing alone for keys, one exponential per row for the refresh
of heat, one read of a column for the search of victims.
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
from dflash2.table.keys import KeyNamespace, chain
from dflash2.table.page_table import PageTable
from dflash2.transfer.inline import InlineTransferEngine
from dflash2.types import KEY_BYTES, IntArray, KVLayout, Tier

BLOCK = 128
NAMESPACE = KeyNamespace(model="none", weights_version="0", dtype="bfloat16", block_size=BLOCK)
LAYOUT = KVLayout(num_layers=1, num_kv_heads=1, head_dim=1, block_size=BLOCK, dtype="bfloat16")
STEPS = 64
"""Decode steps of a repeat: half the length of a block."""
ROOM_TOKENS = 8192
"""Most decode steps of a run."""
NOBODY = np.empty(0, np.int32)
CHAIN_BLOCKS = 256
CHAINS = 40


@dataclass(frozen=True)
class Row:
    """One line of the result."""

    what: str
    ms: float
    per_second: float | None = None
    """Blocks per second, where that is what is counted."""
    limit_ms: float | None = None
    """The floor, measured in the same run."""


class Bench:
    """A manager over pools that hold no bytes, HBM filled with resident sequences.

    Args:
        num_sequences: resident.
        num_tokens: of the shortest; the others are up to a block longer.
        num_rows: rows of the page table.
    """

    def __init__(self, num_sequences: int, num_tokens: int, num_rows: int) -> None:
        self.now = 1_000.0
        hbm = int(1.2 * num_sequences * (num_tokens // BLOCK + 1))
        sizes = {Tier.HBM: hbm, Tier.DRAM: hbm, Tier.NVME: max(1, num_rows - 2 * hbm)}
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
        self.rng = np.random.default_rng(0)
        self.sequences = [
            self._resident(number, num_tokens + number * BLOCK // num_sequences) for number in range(num_sequences)
        ]
        self.token = np.zeros(1, np.int32)

    def _resident(self, number: int, num_tokens: int) -> Sequence:
        buffer = self.rng.integers(0, 50_000, num_tokens + ROOM_TOKENS, dtype=np.int32)
        prompt = buffer[:num_tokens]
        sequence = self.cache.open(str(number), NAMESPACE.root(), prompt, 0.0)
        sequence.read_from(buffer)  # as in the engine: tokens are handed over without a copy
        assert self.cache.residency.try_enter(sequence, len(prompt), self.now)
        assert self.cache.residency.try_grow(sequence, len(prompt), self.now)
        self.cache.advance([(sequence, prompt)])
        return sequence

    def decode_step(self) -> None:
        """One token more for every sequence, and what runs between steps."""
        residency = self.cache.residency
        self.now += 0.02
        for sequence in self.sequences:
            if not (residency.try_extend(sequence, 1) and residency.try_grow(sequence, 1, self.now)):
                raise SystemExit("a resident sequence had no room for a token")
        self.cache.advance([(sequence, self.token) for sequence in self.sequences])
        self.cache.mover.poll(self.now)
        self.rebalancer.run(NOBODY, self.now)

    def crowded(self) -> None:
        """From now on HBM is above its high watermark, and nothing in it is cold."""
        self.rebalancer.watermarks = Watermarks(0.1, 0.05)


def median_ms(call: Callable[[], object], repeats: int, times: int = 1) -> float:
    return 1e3 * statistics.median(spans_of(call, repeats, times))


def spans_of(call: Callable[[], object], repeats: int, times: int = 1) -> list[float]:
    """Seconds of one call, for each repeat the mean over ``times``."""
    spans = []
    for _ in range(repeats):
        start = time.perf_counter()
        for _ in range(times):
            call()
        spans.append((time.perf_counter() - start) / times)
    return spans


def steps(bench: Bench, repeats: int) -> list[Row]:
    num = len(bench.sequences)
    single = spans_of(bench.decode_step, repeats * STEPS)
    means = [statistics.fmean(single[first : first + STEPS]) for first in range(0, len(single), STEPS)]
    rows = [
        Row(f"decode step, {num} sequences resident", 1e3 * statistics.median(means)),
        Row("the slowest hundredth of these steps", 1e3 * float(np.percentile(single, 99))),
    ]
    bench.crowded()
    present = bench.table.present
    floor = median_ms(lambda: np.flatnonzero(present & 1), repeats)
    return [
        *rows,
        Row("decode step, HBM full and nothing cold", median_ms(bench.decode_step, repeats, STEPS), None, floor),
    ]


def key_hash(repeats: int) -> tuple[Row, float]:
    """Keys of a prompt, one after the other; tokens per second."""
    prompt = np.random.default_rng(2).integers(0, 50_000, CHAIN_BLOCKS * BLOCK, dtype=np.int32)
    root = NAMESPACE.root()

    def hash_only() -> None:
        for start in range(0, len(prompt), BLOCK):
            hashlib.blake2b(prompt[start : start + BLOCK].tobytes(), digest_size=KEY_BYTES).digest()

    ms = median_ms(lambda: chain(root, prompt, BLOCK), repeats, 3)
    floor = median_ms(hash_only, repeats, 3)
    return Row(f"keys of a prompt of {len(prompt)} tokens", ms, 1e3 * CHAIN_BLOCKS / ms, floor), 1e3 * len(prompt) / ms


def lookups(bench: Bench, repeats: int) -> Row:
    """Chains of known keys, scattered over all rows; each key is a new object, as one is that was just computed."""
    ids = fill(bench)
    keys = np.random.default_rng(3).integers(0, 256, (len(ids), KEY_BYTES), dtype=np.uint8)
    for block_id, key in zip(ids.tolist(), keys, strict=True):
        bench.cache.index.adopt(block_id, key.tobytes())
    bench.table.present[ids] = 4
    spans = []
    for _ in range(repeats):
        chains = [[key.tobytes() for key in keys[bench.rng.integers(0, len(ids), CHAIN_BLOCKS)]] for _ in range(CHAINS)]
        start = time.perf_counter()
        for one in chains:
            bench.cache.index.longest_prefix(one)
        spans.append(time.perf_counter() - start)
    ms = 1e3 * statistics.median(spans) / CHAINS
    bench.table.present[ids] = 0
    for block_id in ids.tolist():
        bench.cache.index.unpublish(block_id)
    bench.table.free(ids)
    return Row(f"lookup of {CHAIN_BLOCKS} known keys among {len(ids)}", ms, 1e3 * CHAIN_BLOCKS / ms)


def refresh(bench: Bench, repeats: int) -> Row:
    ids = fill(bench)
    table, policy = bench.table, bench.cache.policy
    ages = np.linspace(-5.0, 0.0, table.num_rows)
    row = Row(
        f"heat refresh, {table.num_rows} rows in use",
        median_ms(lambda: policy.refresh(table, bench.now), repeats),
        limit_ms=median_ms(lambda: np.exp(ages), repeats),
    )
    table.free(ids)
    return row


def fill(bench: Bench) -> IntArray:
    """Takes all free rows; blocks that nobody holds."""
    table = bench.table
    ids = table.try_allocate(table.num_free_rows)
    assert ids is not None
    table.last_use[ids] = np.linspace(0.0, bench.now, len(ids))
    return ids


def turn(bench: Bench, repeats: int) -> Row:
    """A sequence leaves and enters again, all of it still in HBM."""
    sequence = bench.sequences[0]

    def both() -> None:
        bench.cache.residency.leave(sequence, bench.now)
        assert bench.cache.residency.try_enter(sequence, 1, bench.now)

    return Row(f"one sequence of {len(sequence.block_ids)} blocks leaves and enters", median_ms(both, repeats, 5))


def show(rows: list[Row]) -> str:
    lines = [f"{'what':<52} {'ms':>10} {'limit ms':>10} {'blocks/s':>12}"]
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
    repeats = arguments.repeats
    step_rows = steps(bench, repeats)
    keys, key_tokens_per_s = key_hash(repeats)
    lookup, heat = lookups(bench, repeats), refresh(bench, repeats)
    rows = [*step_rows, keys, lookup, heat, turn(bench, repeats)]
    print(show(rows))
    print(f"page table: {bench.table.bytes_per_row} bytes a row")
    if arguments.json is not None:
        result = {
            "step_us": round(1e3 * step_rows[0].ms, 1),
            "lookups_per_s": round(lookup.per_second or 0),
            "key_hash_tokens_per_s": round(key_tokens_per_s),
            "page_table_bytes_per_row": bench.table.bytes_per_row,
            "heat_refresh_ms": round(heat.ms, 2),
            "heat_refresh_blocks": bench.table.num_rows,
            "repeats": repeats,
            "rows": [asdict(row) for row in rows],
        }
        arguments.json.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
