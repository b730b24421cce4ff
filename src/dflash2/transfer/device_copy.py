"""What a device needs so that blocks can be copied between it and host memory: a copier, and page-locked memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from dflash2.errors import ConfigError
from dflash2.pools.base import PieceCopier
from dflash2.pools.page_memory import PageLock
from dflash2.transfer.cpu_copy import CpuCopier
from dflash2.transfer.engine import DEFAULT_COPY_THREADS


@dataclass(frozen=True, slots=True)
class HostAccess:
    """How a device reaches host memory.

    Attributes:
        page_lock: page-locks what the device copies from and to; None where there is no device.
        copy_threads: threads that copy in each direction; one where the device copies by itself.
    """

    page_lock: PageLock | None
    copy_threads: int


def create_copier(device: str, batch_blocks: int, block_bytes: int, compute_stream: Any = None) -> PieceCopier:
    """The copier of a device.

    Args:
        device: torch device.
        batch_blocks: most blocks of a batch (``swap_batch_size``).
        block_bytes: payload of a block. CUDA: ``DEVICE_STAGING_BATCHES`` of them are taken at once.
        compute_stream: CUDA: the stream on which steps write KV; None: the default one.

    Raises:
        ConfigError: neither a CPU nor a CUDA device.
        CapacityError: the device memory cannot be had.
    """
    if not _is_cuda(device):
        return CpuCopier()
    from dflash2.transfer.cuda_copy import CudaCopier  # needs triton

    return CudaCopier(device, batch_blocks, block_bytes, compute_stream)


def host_access(device: str) -> HostAccess:
    """How a device reaches host memory.

    Raises:
        ConfigError: neither a CPU nor a CUDA device.
    """
    if not _is_cuda(device):
        return HostAccess(None, DEFAULT_COPY_THREADS)
    from dflash2.transfer.cuda_copy import page_lock  # needs triton

    return HostAccess(page_lock, copy_threads=1)


def _is_cuda(device: str) -> bool:
    kind = device.partition(":")[0]
    if kind not in ("cpu", "cuda"):
        raise ConfigError(f"KV cannot be kept on the device {device}, only on cpu, cuda, cuda:0 and so on")
    return kind == "cuda"
