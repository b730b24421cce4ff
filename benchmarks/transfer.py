"""Measures the data path against the limits of this machine, taken in the same run.

    python benchmarks/transfer.py [--json FILE] [--directory DIR] [--size-mb 256] [--repeats 7] [--routes hbm>dram,...]

Limits: memcpy of one large buffer, the better of one and two threads; the disk, the best of several depths of O_DIRECT
calls of 1 MiB on an already written file. Limits and paths alternate in every repeat and medians are reported, because
a shared machine drifts: only the ratios mean something. HBM slots are drawn at random; DRAM and NVMe slots come in runs
of one batch, as an allocator hands them out, or at random with ``--slots random``.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from limits import DISK_DEPTHS, DiskLimit, MemcpyLimit, seconds

from dflash2.pools.base import BlockPool, PieceCopier
from dflash2.pools.dram import DramPool
from dflash2.pools.file_wrappers import PacedFiles, payload_writes
from dflash2.pools.fileops import OsFileOps
from dflash2.pools.nvme import NvmeOptions, NvmePool
from dflash2.pools.page_memory import PageMemory
from dflash2.pools.tensor import LayerFirstPool, TensorPool
from dflash2.transfer.base import CopyJob
from dflash2.transfer.cpu_copy import CpuCopier
from dflash2.transfer.engine import ThreadedTransferEngine
from dflash2.types import MIB, ByteArray, IntArray, KVLayout, Tier, Urgency

BATCH_BLOCKS = 32
BLOCK_KIB = (64, 128, 1024, 4096)
NUM_LAYERS = 30
"""Of the layer-first layout: 60 pieces a block."""


@dataclass(frozen=True)
class Row:
    """One line of the result; ``ratio`` is the median over repeats of path / limit of the same repeat."""

    route: str
    layout: str
    mode: str
    block_bytes: int
    gb_s: float
    limit_gb_s: float
    ratio: float


@dataclass(frozen=True)
class Route:
    """One thing to time: moves ``nbytes`` bytes when called, against the limit of that name."""

    route: str
    layout: str
    mode: str
    block_bytes: int
    nbytes: int
    limit: str
    run: Callable[[], None]


class DeviceCopyLimit:
    """One large asynchronous copy from the device to page-locked memory."""

    def __init__(self, nbytes: int) -> None:
        self._src = torch.ones(nbytes, dtype=torch.uint8, device="cuda")
        self._dst = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)

    def gb_s(self) -> float:
        def copy() -> None:
            self._dst.copy_(self._src, non_blocking=True)
            torch.cuda.synchronize()

        return len(self._src) / seconds(copy) / 1e9


# Paths


def block_layout(block_bytes: int, num_layers: int) -> KVLayout:
    """A layout of that many layers and about that many bytes: one byte a value, 64 values a head, one token."""
    per_token = 2 * num_layers * 64
    heads = max(1, block_bytes // per_token // 16)
    return KVLayout(num_layers, heads, 64, block_bytes // (per_token * heads), "uint8")


def slots_in_runs(count: int, rng: np.random.Generator) -> IntArray:
    """All batches contiguous, batches in random order; ``count`` is a multiple of a batch."""
    starts = rng.permutation(np.arange(0, count, BATCH_BLOCKS))
    return (starts[:, None] + np.arange(BATCH_BLOCKS)).ravel().astype(np.int32)


def urgency_of(src: Tier, dst: Tier) -> Urgency:
    return Urgency.DEMAND if dst < src else Urgency.DEMOTION


@dataclass
class Bench:
    """Pools and an engine for one layout."""

    layout: KVLayout
    name: str
    pools: dict[Tier, BlockPool]
    engine: ThreadedTransferEngine
    count: int
    slots: dict[Tier, IntArray]
    keys: ByteArray

    def move(self, *pairs: tuple[Tier, Tier, slice]) -> None:
        tickets = [
            self.engine.submit(
                CopyJob(src, dst, self.slots[src][part], self.slots[dst][part], urgency_of(src, dst), self.keys[part])
            )
            for src, dst, part in pairs
        ]
        if not self.engine.wait(tickets, 300.0):
            raise SystemExit("a transfer did not end in 300 s")
        if not all(done.ok.all() for done in self.engine.poll()):
            raise SystemExit("a transfer failed; no figure can be given")


def device_pool(layout: KVLayout, num_slots: int, layered: bool, device: str) -> BlockPool:
    copier: PieceCopier = CpuCopier()
    if device == "cuda":
        from dflash2.transfer.cuda_copy import CudaCopier

        copier = CudaCopier(device, BATCH_BLOCKS, layout.block_bytes)
    if not layered:
        return TensorPool(num_slots, layout, copier, device)
    piece = layout.block_bytes // (2 * layout.num_layers)
    tensors = []
    for _ in range(2 * layout.num_layers):
        if device == "cuda":
            raw = torch.empty(num_slots * piece, dtype=torch.uint8, device=device)
        else:
            raw = torch.from_numpy(PageMemory(num_slots * piece).bytes[: num_slots * piece])
        tensors.append(raw.view(num_slots, layout.block_size, layout.num_kv_heads, layout.head_dim))
    return LayerFirstPool(tensors[0::2], tensors[1::2], layout, copier)


@contextmanager
def bench(
    layout: KVLayout, directory: Path, nbytes: int, layered: bool, options: NvmeOptions, lower_slots: str, device: str
) -> Iterator[Bench]:
    count = max(BATCH_BLOCKS, nbytes // layout.stride_bytes // BATCH_BLOCKS * BATCH_BLOCKS)
    rng = np.random.default_rng(1)
    lock = None
    if device == "cuda":
        from dflash2.transfer.cuda_copy import page_lock as lock
    pools: dict[Tier, BlockPool] = {
        Tier.HBM: device_pool(layout, count, layered, device),
        Tier.DRAM: DramPool(count, layout, lock),
        Tier.NVME: NvmePool([directory], "bench", count, layout, bytes(32), options),
    }
    engine = ThreadedTransferEngine(
        pools, 512 * MIB, BATCH_BLOCKS, copy_threads=1 if device == "cuda" else 2, page_lock=lock
    )
    slots = {tier: rng.permutation(count).astype(np.int32) for tier in Tier}
    if lower_slots == "runs":
        slots |= {tier: slots_in_runs(count, rng) for tier in (Tier.DRAM, Tier.NVME)}
    slabs = pools[Tier.DRAM].slabs  # type: ignore[attr-defined]
    slabs[:] = rng.integers(0, 256, slabs.shape, dtype=np.uint8)
    keys = rng.integers(0, 256, (count, 32), dtype=np.uint8)
    ready = Bench(layout, "layer" if layered else "block", pools, engine, count, slots, keys)
    ready.move((Tier.DRAM, Tier.HBM, slice(None)))
    ready.move((Tier.DRAM, Tier.NVME, slice(None)))  # first writes into fresh space are slower
    try:
        yield ready
    finally:
        engine.close(30.0)
        for pool in pools.values():
            pool.close()


def paths_of(ready: Bench, routes: set[str]) -> list[Route]:
    everything, half = slice(None), ready.count // 2
    first, second = slice(0, half), slice(half, None)
    hbm, dram, nvme = Tier.HBM, Tier.DRAM, Tier.NVME
    plans = {
        "hbm>dram": ("memcpy", [(hbm, dram, everything)]),
        "dram>hbm": ("memcpy", [(dram, hbm, everything)]),
        "both": ("memcpy", [(dram, hbm, first), (hbm, dram, second)]),
        "dram>nvme": ("disk write", [(dram, nvme, everything)]),
        "nvme>dram": ("disk read", [(nvme, dram, everything)]),
    }
    size = ready.layout.block_bytes
    paths = [
        Route(route, ready.name, "staged", size, ready.count * size, limit, lambda pairs=pairs: ready.move(*pairs))  # type: ignore[misc]
        for route, (limit, pairs) in plans.items()
        if route in routes and not (ready.name == "layer" and "nvme" in route)
    ]
    if ready.name == "layer":
        for route in ("hbm>dram", "dram>hbm"):
            if route in routes:
                run = lambda out=route == "hbm>dram": piece_by_piece(ready, out)  # type: ignore[misc]  # noqa: E731
                paths.append(Route(route, "layer", "pieces", size, ready.count * size, "memcpy", run))
    return paths


def piece_by_piece(ready: Bench, outwards: bool) -> None:
    """What is compared with: one torch copy per piece, without batches or threads of its own."""
    slabs = torch.from_numpy(ready.pools[Tier.DRAM].slabs)  # type: ignore[attr-defined]
    pieces: list[torch.Tensor] = ready.pools[Tier.HBM].pieces  # type: ignore[attr-defined]
    width = pieces[0].shape[1]
    for i, j in zip(ready.slots[Tier.HBM].tolist(), ready.slots[Tier.DRAM].tolist(), strict=True):
        for index, piece in enumerate(pieces):
            host = slabs[j, index * width : (index + 1) * width]
            (host.copy_(piece[i]) if outwards else piece[i].copy_(host))


# The run


def measure(
    paths: list[Route], limits: dict[str, Callable[[], float]], repeats: int
) -> tuple[list[Row], dict[str, float]]:
    """Each repeat takes every limit once and every path once; ratios are within a repeat."""
    seen: dict[str, list[float]] = {name: [] for name in limits}
    speeds: list[list[float]] = [[] for _ in paths]
    ratios: list[list[float]] = [[] for _ in paths]
    for path in paths:
        path.run()
    for _ in range(repeats):
        for i, path in enumerate(paths):
            limit = limits[path.limit]()
            speed = path.nbytes / seconds(path.run) / 1e9
            limit = max(limit, limits[path.limit]()) if path.limit == "memcpy" else limit
            seen[path.limit].append(limit)
            speeds[i].append(speed)
            ratios[i].append(speed / limit)
    medians = {name: round(statistics.median(values), 2) for name, values in seen.items() if values}
    rows = [
        Row(
            path.route,
            path.layout,
            path.mode,
            path.block_bytes,
            round(statistics.median(speed), 2),
            medians[path.limit],
            round(statistics.median(ratio), 3),
        )
        for path, speed, ratio in zip(paths, speeds, ratios, strict=True)
    ]
    return rows, medians


def checksum_cost(directory: Path, nbytes: int, repeats: int) -> dict[str, float]:
    """Share of the time of a store and of a load that checksums take; the same transfers alternate with and without."""
    spans: dict[str, list[float]] = {"store": [], "load": [], "bare store": [], "bare load": []}
    with bench(block_layout(MIB, 1), directory, nbytes, False, NvmeOptions(), "runs", "cpu") as ready:
        payload_io = ready.pools[Tier.NVME]._io  # type: ignore[attr-defined]
        for repeat in range(repeats + 1):
            for prefix in ("", "bare "):
                payload_io._payload_bytes = 0 if prefix else ready.layout.block_bytes  # what a checksum covers
                store = seconds(lambda: ready.move((Tier.DRAM, Tier.NVME, slice(None))))
                load = seconds(lambda: ready.move((Tier.NVME, Tier.DRAM, slice(None))))
                if repeat:
                    spans[f"{prefix}store"].append(store)
                    spans[f"{prefix}load"].append(load)
    median = {name: statistics.median(values) for name, values in spans.items()}
    return {name: round(1 - median[f"bare {name}"] / median[name], 3) for name in ("store", "load")}


def beside_python(directory: Path, nbytes: int, repeats: int) -> list[dict[str, float | str]]:
    """Stores and loads beside a thread that computes in Python, as an engine's scheduler does, against those alone."""
    rows: list[dict[str, float | str]] = []
    for block_bytes in (128 * 1024, MIB):
        with bench(block_layout(block_bytes, 1), directory, nbytes, False, NvmeOptions(), "runs", "cpu") as ready:
            for route, tiers in {"dram>nvme": (Tier.DRAM, Tier.NVME), "nvme>dram": (Tier.NVME, Tier.DRAM)}.items():
                speeds: list[tuple[float, float]] = []
                for _ in range(repeats):
                    move = lambda: ready.move((*tiers, slice(None)))  # noqa: B023, E731
                    alone = seconds(move)
                    stop = threading.Event()
                    thread = threading.Thread(target=compute, args=(stop,))
                    thread.start()
                    beside = seconds(move)
                    stop.set()
                    thread.join()
                    moved = ready.count * block_bytes / 1e9
                    speeds.append((moved / beside, alone / beside))
                gb_s, ratio = (round(statistics.median(values), 2) for values in zip(*speeds, strict=True))
                rows.append({"route": route, "block_bytes": block_bytes, "gb_s": gb_s, "ratio_to_alone": ratio})
    return rows


def compute(stop: threading.Event) -> None:
    total = 0
    while not stop.is_set():
        for number in range(1000):
            total += number * number


def slow_device(directory: Path, seconds_each: float, nbytes: int) -> dict[str, float]:
    """Latency of single-block loads with no stores, and with stores to a device that takes a tenth of its speed."""
    layout = block_layout(MIB, 1)
    files = PacedFiles(OsFileOps(), payload_writes, None)
    with bench(layout, directory, nbytes, False, NvmeOptions(files=files), "runs", "cpu") as ready:
        written = seconds(lambda: ready.move((Tier.DRAM, Tier.NVME, slice(None))))
        idle = load_latencies(ready, seconds_each)
        files.bytes_per_s = ready.count * layout.block_bytes / written / 10
        half = ready.count // 2
        job = CopyJob(
            Tier.DRAM,
            Tier.NVME,
            ready.slots[Tier.DRAM][half:],
            ready.slots[Tier.NVME][half:],
            Urgency.DEMOTION,
            ready.keys[half:],
        )
        slow = load_latencies(ready, seconds_each, job)
        files.bytes_per_s = None
    return {"idle_load_p99_ms": round(idle * 1e3, 2), "slow_load_p99_ms": round(slow * 1e3, 2)}


def load_latencies(ready: Bench, for_s: float, background: CopyJob | None = None) -> float:
    """p99 in seconds of loading one block NVMe to DRAM, while ``background`` is resubmitted whenever it ends."""
    taken: list[float] = []
    rng = np.random.default_rng(3)
    half = ready.count // 2
    running: int | None = None
    end = time.monotonic() + for_s
    while time.monotonic() < end:
        if background is not None and (running is None or ready.engine.wait([running], 0.0)):
            running = ready.engine.submit(background)
        at = int(rng.integers(half))
        part = slice(at, at + 1)
        job = CopyJob(
            Tier.NVME,
            Tier.DRAM,
            ready.slots[Tier.NVME][part],
            ready.slots[Tier.DRAM][part],
            Urgency.DEMAND,
            ready.keys[part],
        )
        start = time.monotonic()
        ready.engine.wait([ready.engine.submit(job)], 60.0)
        taken.append(time.monotonic() - start)
        ready.engine.poll()
        time.sleep(0.002)
    if running is not None:
        ready.engine.wait([running], 120.0)
        ready.engine.poll()
    return float(np.percentile(taken, 99))


def lmcache(directory: Path, args: argparse.Namespace) -> list[dict[str, object]]:
    """LMCache's rows, or one that says why there are none."""
    python = args.peer_environment / "bin" / "python"
    try:
        if not python.exists():
            subprocess.run([sys.executable, "-m", "venv", args.peer_environment], check=True, capture_output=True)
        find = "import importlib.util, sys; sys.exit(importlib.util.find_spec('lmcache') is None)"
        if subprocess.run([python, "-c", find]).returncode:  # new, or its installation was interrupted
            packages = [f"torch=={torch.__version__.split('+')[0]}", "numpy", "lmcache"]
            subprocess.run(
                [python, "-m", "pip", "install", "-q", *packages], check=True, capture_output=True, text=True
            )
        script = Path(__file__).with_name("peer_lmcache.py")
        sizes = [str(kib) for kib in args.block_kib]
        run = subprocess.run(
            [python, script, directory, str(args.size_mb), str(args.repeats), *sizes],
            check=True,
            capture_output=True,
            text=True,
            timeout=3600,
        )
    except (OSError, subprocess.SubprocessError) as error:
        reason = str(getattr(error, "stderr", None) or error).strip().splitlines()[-1]
        print(f"LMCache cannot be measured here: {reason}")
        return [{"name": "LMCache", "error": reason}]
    (line,) = [line for line in run.stdout.splitlines() if line.startswith("RESULT ")]
    rows: list[dict[str, object]] = json.loads(line.removeprefix("RESULT "))
    for row in rows:
        print(f"{row['route']:10} LMCache {row['backend']:5} {row['block_bytes']} B  ratio {row['ratio']}")
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the result here as well")
    parser.add_argument("--directory", type=Path, default=None, help="on the device to measure (default: temporary)")
    parser.add_argument("--size-mb", type=int, default=256, help="bytes moved per path and repeat")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--block-kib", type=int, nargs="*", default=BLOCK_KIB)
    parser.add_argument("--routes", default="hbm>dram,dram>hbm,both,dram>nvme,nvme>dram")
    parser.add_argument("--layouts", default="block,layer")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="where the HBM pool lies")
    parser.add_argument("--slots", choices=("runs", "random"), default="runs")
    parser.add_argument("--slow-device-s", type=float, default=10.0, help="seconds for each half; 0 leaves it out")
    parser.add_argument("--peers", action="store_true", help="also measure LMCache's CPU and disk backends")
    parser.add_argument("--peer-environment", type=Path, default=Path(".venv-peers"), help="made if it is not there")
    args = parser.parse_args()
    nbytes, routes = args.size_mb * MIB, set(args.routes.split(","))
    rows: list[Row] = []
    limits_seen: dict[str, float] = {}
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=args.directory)))
        threads = stack.enter_context(ThreadPoolExecutor(max(DISK_DEPTHS)))
        disk = DiskLimit(directory, nbytes, threads)
        stack.callback(disk.close)
        limits = {
            "memcpy": (DeviceCopyLimit(nbytes) if args.device == "cuda" else MemcpyLimit(nbytes, threads)).gb_s,
            "disk write": disk.write_gb_s,
            "disk read": disk.read_gb_s,
        }
        io_mode = "buffered"
        for layered in (name == "layer" for name in args.layouts.split(",")):
            for kib in args.block_kib:
                layout = block_layout(kib * 1024, NUM_LAYERS if layered else 1)
                with bench(layout, directory, nbytes, layered, NvmeOptions(), args.slots, args.device) as ready:
                    io_mode = ready.pools[Tier.NVME].io_mode  # type: ignore[attr-defined]
                    got, medians = measure(paths_of(ready, routes), limits, args.repeats)
                rows += got
                limits_seen.update(medians)
                for row in got:
                    print(
                        f"{row.route:10} {row.layout:6} {row.mode:7} {row.block_bytes / 1024:7.0f} KiB "
                        f"{row.gb_s:6.2f} GB/s of {row.limit_gb_s:6.2f}  ratio {row.ratio:.2f}",
                        flush=True,
                    )
        slow = slow_device(directory, args.slow_device_s, nbytes) if args.slow_device_s else None
        cost = checksum_cost(directory, nbytes, args.repeats) if "dram>nvme" in routes else None
        if cost is not None:
            print(f"checksums take {cost['store']:.1%} of a store and {cost['load']:.1%} of a load of 1 MiB blocks")
        beside = beside_python(directory, nbytes, args.repeats) if "dram>nvme" in routes else []
        for line in beside:
            name = f"{line['route']:10} beside Python {line['block_bytes']} B"
            print(f"{name}  {line['gb_s']} GB/s, {line['ratio_to_alone']} of alone")
        peers = lmcache(directory, args) if args.peers else []
        if slow is not None:
            print(f"slow device: load p99 {slow['idle_load_p99_ms']} ms idle, {slow['slow_load_p99_ms']} ms slow")
    result = {
        "limits": limits_seen,
        "repeats": args.repeats,
        "checksum": "xxh3-64",
        "direct_io": io_mode == "direct",
        "device": args.device,
        "slots": args.slots,
        "rows": [asdict(row) for row in rows],
        "checksum_cost": cost,
        "slow_device": slow,
        "beside_python": beside,
        "peers": peers,
    }
    if args.json is not None:
        args.json.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
