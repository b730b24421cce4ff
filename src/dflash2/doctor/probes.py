"""Measures a machine: memcpy, HBM to DRAM and back, NVMe. Small, bounded, and leaves nothing behind.

Blocks move through the project's own pools and transfer engine wherever those can serve the device, so that the
figures include what a swap includes: staging, threads, checksums.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import torch

from dflash2.doctor.profile import DeviceProfile
from dflash2.errors import StorageError
from dflash2.pools.base import BlockPool
from dflash2.pools.dram import DramPool
from dflash2.pools.nvme import NvmePool
from dflash2.pools.nvme_format import FINGERPRINT_BYTES
from dflash2.pools.tensor import TensorPool
from dflash2.transfer.base import CopyJob
from dflash2.transfer.cpu_copy import CpuCopier
from dflash2.transfer.engine import ThreadedTransferEngine
from dflash2.types import MIB, PAGE_BYTES, KVLayout, Tier, Urgency

DEFAULT_BLOCK_BYTES = 2 * MIB
PROBE_BYTES = 256 * MIB
REPEATS = 3
TIMEOUT_S = 120.0
_MAX_SHARE = 8
"""At most one part in so many of the free space and of the free memory is used."""


class OnStep(Protocol):
    """Told what is being measured, so that progress can be shown."""

    def __call__(self, name: str) -> None:
        """``name`` has begun."""
        ...


STEPS = ("memcpy", "HBM to DRAM and back", "NVMe write and read")


@dataclass(frozen=True, slots=True)
class ProbeSize:
    """How much is moved: ``num_blocks`` blocks of ``layout``, ``repeats`` times, of which the fastest counts."""

    layout: KVLayout
    num_blocks: int
    repeats: int = REPEATS

    @property
    def num_bytes(self) -> int:
        """Bytes of one repetition."""
        return self.num_blocks * self.layout.stride_bytes


def probe_size(block_bytes: int | None, available_bytes: int, total_bytes: int = PROBE_BYTES) -> ProbeSize:
    """Choose a size.

    Args:
        block_bytes: of the model's blocks on one rank; None for blocks of ``DEFAULT_BLOCK_BYTES``.
        available_bytes: memory and disk space that are free; an eighth is the most that is used.
        total_bytes: to be moved at once, where there is room.

    Raises:
        StorageError: there is not even room for two blocks.
    """
    rounded = -(-(block_bytes or DEFAULT_BLOCK_BYTES) // PAGE_BYTES) * PAGE_BYTES
    layout = KVLayout(num_layers=1, num_kv_heads=1, head_dim=rounded // 16, block_size=8, dtype="uint8")
    num_blocks = min(total_bytes, available_bytes // _MAX_SHARE) // rounded
    if num_blocks < 2:
        raise StorageError(f"{available_bytes} free bytes are too few to measure with blocks of {rounded} bytes")
    return ProbeSize(layout, num_blocks)


def measure(size: ProbeSize, nvme_folder: Path | None, on_step: OnStep, device: str | None = None) -> DeviceProfile:
    """Measure everything that is there.

    Args:
        size: how much to move.
        nvme_folder: an existing folder on the disk to be measured; None leaves it out. A folder is made in it and
            removed again.
        on_step: called with each name of ``STEPS`` that is measured.
        device: torch device; by default the first CUDA device, or the CPU.

    Raises:
        CapacityError: the memory for it cannot be had.
        StorageError: the folder cannot be used, or the disk fails.
    """
    chosen = device or ("cuda" if torch.cuda.is_available() else "cpu")
    on_step(STEPS[0])
    memcpy = _memcpy(size)
    on_step(STEPS[1])
    out, back = _host_copies(size) if chosen == "cpu" else _device_copies(size, chosen)
    write = read = None
    mode = ""
    if nvme_folder is not None:
        on_step(STEPS[2])
        write, read, mode = _disk(size, nvme_folder)
    return DeviceProfile(
        device="cpu" if chosen == "cpu" else torch.cuda.get_device_name(chosen),
        block_bytes=size.layout.stride_bytes,
        memcpy=memcpy,
        hbm_to_dram=out,
        dram_to_hbm=back,
        nvme_write=write,
        nvme_read=read,
        nvme_path="" if nvme_folder is None else str(nvme_folder),
        io_mode=mode,
    )


def _memcpy(size: ProbeSize) -> float:
    source = torch.ones(size.num_bytes, dtype=torch.uint8)
    target = torch.zeros_like(source)
    return size.num_bytes / _fastest(lambda: target.copy_(source), size.repeats)


def _device_copies(size: ProbeSize, device: str) -> tuple[float, float]:
    """Between the device and page-locked memory; bytes per second out and in."""
    host = torch.ones(size.num_bytes, dtype=torch.uint8, pin_memory=True)
    held = torch.zeros(size.num_bytes, dtype=torch.uint8, device=device)

    def copy(target: torch.Tensor, source: torch.Tensor) -> None:
        target.copy_(source, non_blocking=True)
        torch.cuda.synchronize(device)

    out = _fastest(lambda: copy(host, held), size.repeats)
    back = _fastest(lambda: copy(held, host), size.repeats)
    return size.num_bytes / out, size.num_bytes / back


def _host_copies(size: ProbeSize) -> tuple[float, float]:
    """Between the CPU's fast pool and the DRAM pool, through the transfer engine."""
    hbm = TensorPool(size.num_blocks, size.layout, CpuCopier())
    with _engine({Tier.HBM: hbm, Tier.DRAM: DramPool(size.num_blocks, size.layout)}, size) as engine:
        out = _fastest(lambda: _move(engine, size, Tier.HBM, Tier.DRAM), size.repeats)
        back = _fastest(lambda: _move(engine, size, Tier.DRAM, Tier.HBM), size.repeats)
    return size.num_bytes / out, size.num_bytes / back


def _disk(size: ProbeSize, folder: Path) -> tuple[float, float, str]:
    """Between the DRAM pool and an NVMe pool in a folder of its own; bytes per second written and read."""
    try:
        own = Path(tempfile.mkdtemp(prefix=".dflash2-probe-", dir=folder))
    except OSError as error:
        raise StorageError(f"cannot measure in {folder}: {error.strerror or error}") from error
    try:
        dram = DramPool(size.num_blocks, size.layout)
        dram.slabs[:] = np.random.default_rng(0).integers(0, 256, size.layout.stride_bytes, dtype=np.uint8)
        nvme = NvmePool([own], "probe", size.num_blocks, size.layout, bytes(FINGERPRINT_BYTES))
        with _engine({Tier.DRAM: dram, Tier.NVME: nvme}, size) as engine:
            write = _fastest(lambda: _move(engine, size, Tier.DRAM, Tier.NVME, own), size.repeats)
            read = _fastest(
                lambda: _move(engine, size, Tier.NVME, Tier.DRAM), size.repeats, before=lambda: _drop_cache(own)
            )
            mode = nvme.io_mode
        return size.num_bytes / write, size.num_bytes / read, mode
    finally:
        shutil.rmtree(own)


def _move(engine: ThreadedTransferEngine, size: ProbeSize, src: Tier, dst: Tier, synced: Path | None = None) -> None:
    slots = np.arange(size.num_blocks, dtype=np.int32)
    ticket = engine.submit(CopyJob(src, dst, slots, slots, Urgency.DEMAND))
    if not engine.wait([ticket], TIMEOUT_S):
        raise StorageError(f"{size.num_bytes} bytes from {src.label} to {dst.label} took more than {TIMEOUT_S:.0f} s")
    if not all(done.ok.all() for done in engine.poll()):
        raise StorageError(f"a copy from {src.label} to {dst.label} failed; the log says why")
    if synced is not None:
        _sync(synced)


def _sync(own: Path) -> None:
    """Buffered writes count only when they are on the disk."""
    for file in own.rglob("data"):
        fd = os.open(file, os.O_RDONLY)
        try:
            os.fdatasync(fd)
        finally:
            os.close(fd)


def _drop_cache(own: Path) -> None:
    """Buffered reads must come from the disk, not from the page cache."""
    for file in own.rglob("data"):
        fd = os.open(file, os.O_RDONLY)
        try:
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)


@contextmanager
def _engine(pools: dict[Tier, BlockPool], size: ProbeSize) -> Iterator[ThreadedTransferEngine]:
    engine = ThreadedTransferEngine(pools, 4 * size.num_bytes)
    try:
        yield engine
    finally:
        engine.close(TIMEOUT_S)
        for pool in pools.values():
            pool.close()


def _fastest(action: Callable[[], object], repeats: int, before: Callable[[], object] = lambda: None) -> float:
    """Seconds of the fastest of ``repeats`` runs after one that warms up: what disturbs a run only slows it."""
    durations: list[float] = []
    for _ in range(1 + repeats):
        before()
        start = time.perf_counter()
        action()
        durations.append(time.perf_counter() - start)
    return min(durations[1:])
