"""A runtime for a CUDA device where there is none: what torch and the driver say is stood in for, all else is real."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

os.environ.setdefault("TRITON_INTERPRET", "1")  # read when the kernel is decorated, so before the imports below
pytest.importorskip("triton")

from tests.test_build import LAYOUT, PROMPT, SPACE, compute, config

from dflash2 import Runtime, build, create_runtime
from dflash2.errors import CapacityError, ConfigError
from dflash2.pools.base import PieceCopier
from dflash2.pools.tensor import LayerFirstPool, TensorPool
from dflash2.transfer import cuda_copy
from dflash2.transfer.cuda_copy import CudaCopier
from dflash2.types import MIB, ByteArray, IntArray, KVLayout, Tier

BATCH = 4
STAGING_BYTES = 2 * BATCH * LAYOUT.block_bytes
_one_launch = threading.Lock()
"""Triton's interpreter knows no threads."""


class InterpretedCopier(CudaCopier):
    """Its kernel runs on the CPU. Page-locked host memory is all it takes, as a device that reads by itself would."""

    locked: list[tuple[int, int]]
    made: list[InterpretedCopier]

    def __init__(self, device: str, *args: Any) -> None:
        assert device.startswith("cuda")
        super().__init__("cpu", *args)
        self.made.append(self)

    def gather(self, pieces: Any, slots: IntArray, buffer: ByteArray, rows: IntArray) -> None:
        self._check_locked(buffer)
        with _one_launch:
            super().gather(pieces, slots, buffer, rows)

    def scatter(self, pieces: Any, slots: IntArray, buffer: ByteArray, rows: IntArray) -> None:
        self._check_locked(buffer)
        with _one_launch:
            super().scatter(pieces, slots, buffer, rows)

    def _check_locked(self, buffer: ByteArray) -> None:
        at = buffer.ctypes.data
        assert any(start <= at and at + buffer.nbytes <= start + size for start, size in self.locked)


class PoolInHostMemory(TensorPool):
    def __init__(self, num_slots: int, layout: KVLayout, copier: PieceCopier, device: str) -> None:
        assert device.startswith("cuda")
        super().__init__(num_slots, layout, copier)


class Device:
    """What the driver would say."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.total_bytes, self.free_bytes = 100 * MIB, 40 * MIB
        self.locked: list[tuple[int, int]] = []
        self.copiers: list[InterpretedCopier] = []
        copier = type("Copier", (InterpretedCopier,), {"locked": self.locked, "made": self.copiers})
        monkeypatch.setattr(build, "total_device_bytes", lambda device: self.total_bytes)
        monkeypatch.setattr(build, "free_device_bytes", lambda device: self.free_bytes)
        monkeypatch.setattr(build, "TensorPool", PoolInHostMemory)
        monkeypatch.setattr(cuda_copy, "CudaCopier", copier)
        monkeypatch.setattr(cuda_copy, "page_lock", self.lock)

    def lock(self, address: int, nbytes: int) -> Callable[[], None]:
        self.locked.append((address, nbytes))
        return lambda: self.locked.remove((address, nbytes))


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    return Device(monkeypatch)


def cuda_runtime(path: Path, **memory: Any) -> Runtime:
    values = config(path, **memory).model_dump()
    values["policy"]["swap_batch_size"] = BATCH
    return create_runtime(type(config(path)).model_validate(values), LAYOUT, SPACE, device="cuda:0")


def test_blocks_leave_for_all_tiers_and_come_back(device: Device, tmp_path: Path) -> None:
    runtime = cuda_runtime(tmp_path, hbm_reserve_mb=70)
    compute(runtime, PROMPT, fill=1000)
    compute(runtime, PROMPT[::-1].copy(), fill=5000)  # 140 blocks in all: HBM holds 128, DRAM 64
    compute(runtime, PROMPT + 7, fill=9000)
    for prompt, fill in ((PROMPT, 1000), (PROMPT + 7, 9000), (PROMPT[::-1].copy(), 5000)):
        for _ in range(20):
            runtime.rebalance([], [])
            runtime.wait(0.05)
        sequence = runtime.open("r", prompt, 1)
        assert sequence is not None and sequence.num_cached_tokens > len(prompt) // 2
        (slots,) = runtime.prepare_step([(sequence, len(prompt) - sequence.num_tokens)])
        for index in range(sequence.num_cached_tokens // 16):
            assert bool((runtime.hbm_tensor[int(slots[index])] == fill + index).all())
        runtime.close(sequence)
    seen = runtime.cache.counters
    assert seen.failed_copies == 0 and seen.loaded_from_nvme_blocks > 0
    assert len(device.copiers) == 1
    assert len(device.locked) == 2, "DRAM and the staging buffer between HBM and NVMe"
    runtime.shutdown()
    assert not device.locked


def test_the_pool_is_the_device_less_reserve_and_staging(device: Device, tmp_path: Path) -> None:
    """Weights that are loaded already are part of the reserve: 60 of 100 MiB are in use and must not count twice."""
    runtime = cuda_runtime(tmp_path, hbm_reserve_mb=70, hbm_capacity_mb=None)
    assert runtime.cache.table.capacity(Tier.HBM) == (30 * MIB - STAGING_BYTES) // LAYOUT.block_bytes
    runtime.shutdown()


@pytest.mark.parametrize(("reserve_mb", "said"), [(100, "leave nothing"), (50, "weights and others hold all but 40")])
def test_a_reserve_that_cannot_be_is_refused(device: Device, tmp_path: Path, reserve_mb: int, said: str) -> None:
    with pytest.raises(CapacityError, match=said):
        cuda_runtime(tmp_path, hbm_reserve_mb=reserve_mb, hbm_capacity_mb=None)
    assert not device.copiers and not device.locked


def test_host_memory_is_locked_for_an_engine_whose_pool_is_on_a_device(device: Device, tmp_path: Path) -> None:
    class OnDevice(LayerFirstPool):
        device = "cuda:1"

    tensors = [[torch.zeros(16 * 16, 2, 32) for _ in range(2)] for _ in range(2)]
    pool = OnDevice(tensors[0], tensors[1], LAYOUT, CudaCopier("cpu", BATCH, LAYOUT.block_bytes))
    runtime = create_runtime(config(tmp_path), LAYOUT, SPACE, engine_pool=pool)
    assert len(device.locked) == 2
    assert runtime.stats()["has_device"]
    runtime.shutdown()


def test_no_other_kind_of_device(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="mps"):
        create_runtime(config(tmp_path), LAYOUT, SPACE, device="mps")


def test_slots_of_the_stand_in_are_not_mixed_up() -> None:
    """The stand-in itself: what is not page-locked is not taken."""
    copier = type("Copier", (InterpretedCopier,), {"locked": [], "made": []})("cuda", 1, LAYOUT.block_bytes)
    with pytest.raises(AssertionError):
        copier.gather([], np.zeros(1, np.int32), np.zeros((1, 4096), np.uint8), np.zeros(1, np.int32))
