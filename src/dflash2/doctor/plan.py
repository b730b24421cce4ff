"""From a model and a machine on paper: what fits where, what a swap costs, and the configuration that follows."""

from __future__ import annotations

import math
from dataclasses import dataclass

from dflash2.config import Config, KVBlockConfig, MemoryConfig, PolicyConfig
from dflash2.doctor.model_shape import KVShape
from dflash2.doctor.parameters import ParameterCount
from dflash2.doctor.profile import DeviceProfile
from dflash2.errors import CapacityError, RequestError
from dflash2.transfer.staging import DEVICE_STAGING_BATCHES, STAGING_BATCHES
from dflash2.types import MIB

ACTIVATION_SHARE = 0.05
MIN_ACTIVATION_BYTES = 2 << 30
"""Allowance for activations, the CUDA context and graphs, unless it is given: a share of the device, at least this."""
PREFILL_EFFICIENCY = 0.4
"""Share of the peak that prefill reaches, for want of a measurement."""
DEFAULT_TFLOPS = 312.0
"""Dense bf16 peak of A100 and A800 (vendor's data sheet)."""
_MIN_BATCH_SHARE = 4
_DEFAULT_MEMORY = MemoryConfig()


@dataclass(frozen=True, slots=True)
class Speeds:
    """What a swap is computed from, in bytes per second.

    Attributes:
        hbm_to_dram: out of one device.
        dram_to_hbm: into one device.
        memcpy: host memory, shared by all ranks.
        nvme_read: disk, shared by all ranks.
        nvme_write: disk, shared by all ranks.
        source: where the figures come from, in words.
    """

    hbm_to_dram: float
    dram_to_hbm: float
    memcpy: float
    nvme_read: float
    nvme_write: float
    source: str


ASSUMED_SPEEDS = Speeds(20e9, 20e9, 80e9, 3e9, 2e9, "assumed: PCIe 4.0 x16 for each device, one NVMe disk")


@dataclass(frozen=True, slots=True)
class PlanRequest:
    """What is asked.

    Attributes:
        shape: the model's KV.
        parameters: its parameters.
        weight_bytes: of all ranks together.
        device_bytes: memory of one device.
        ranks: devices that share the model (tensor parallel) and the machine.
        context_tokens: of one sequence, prompt and output.
        concurrency: sequences at the same time.
        dram_bytes: for the machine; None: propose what is needed.
        nvme_bytes: for the machine; None: propose what is needed.
        block_size: tokens of a block.
        activation_bytes: allowance on each device; None: assume.
        speeds: for swaps.
        prefill_tokens_per_s: measured, of all ranks together; None: computed from ``tflops``.
        tflops: peak of one device.
    """

    shape: KVShape
    parameters: ParameterCount
    weight_bytes: int
    device_bytes: int
    ranks: int
    context_tokens: int
    concurrency: int
    dram_bytes: int | None = None
    nvme_bytes: int | None = None
    block_size: int = 128
    activation_bytes: int | None = None
    speeds: Speeds = ASSUMED_SPEEDS
    prefill_tokens_per_s: float | None = None
    tflops: float = DEFAULT_TFLOPS


@dataclass(frozen=True, slots=True)
class Plan:
    """What follows. Bytes and blocks are of one rank unless said otherwise.

    Attributes:
        request: what was asked.
        bytes_per_token: KV.
        block_bytes: a block in HBM.
        stride_bytes: a block on DRAM and NVMe.
        reserve_bytes: weights and allowance.
        activation_bytes: the allowance in it.
        staging_bytes: of the buffer in host memory, sized to its use.
        hbm_blocks: blocks that HBM holds, beside what the copies take of it.
        dram_bytes: of the machine, as given or proposed.
        nvme_bytes: of the machine, as given or proposed.
        dram_blocks: blocks that DRAM holds.
        nvme_blocks: blocks that NVMe holds.
        batch_blocks: ``swap_batch_size``.
        sequence_blocks: blocks of one sequence at its full length.
    """

    request: PlanRequest
    bytes_per_token: int
    block_bytes: int
    stride_bytes: int
    reserve_bytes: int
    activation_bytes: int
    staging_bytes: int
    hbm_blocks: int
    dram_bytes: int
    nvme_bytes: int
    dram_blocks: int
    nvme_blocks: int
    batch_blocks: int
    sequence_blocks: int

    @property
    def resident_sequences(self) -> int:
        """Sequences that run in HBM at the same time."""
        return self.hbm_blocks // self.sequence_blocks

    @property
    def total_sequences(self) -> int:
        """Sequences that may be open; room to exchange a batch stays free where there are tiers below HBM."""
        below = self.dram_blocks + self.nvme_blocks
        exchange = min(self.batch_blocks, self.hbm_blocks // 4, below // 4)
        return (self.hbm_blocks + below - exchange) // self.sequence_blocks if self.resident_sequences else 0

    @property
    def fits(self) -> bool:
        """Whether the concurrency asked for is held."""
        return self.total_sequences >= self.request.concurrency

    @property
    def sequence_bytes(self) -> int:
        """KV of one sequence."""
        return self.sequence_blocks * self.block_bytes

    def dram_seconds(self, num_blocks: int, inwards: bool) -> float:
        """Time to move blocks between HBM and DRAM on all ranks at once."""
        speeds, num_bytes = self.request.speeds, num_blocks * self.block_bytes
        link = speeds.dram_to_hbm if inwards else speeds.hbm_to_dram
        return max(num_bytes / link, num_bytes * self.request.ranks / speeds.memcpy)

    def nvme_seconds(self, num_blocks: int, inwards: bool) -> float:
        """Time to move blocks between DRAM and the disk on all ranks at once."""
        speeds = self.request.speeds
        return num_blocks * self.stride_bytes * self.request.ranks / (
            speeds.nvme_read if inwards else speeds.nvme_write
        )  # fmt: skip

    @property
    def recompute_seconds(self) -> float:
        """Time to compute the KV of one sequence again."""
        request = self.request
        if request.prefill_tokens_per_s is not None:
            return request.context_tokens / request.prefill_tokens_per_s
        shape = request.shape
        flops = request.parameters.prefill_flops(request.context_tokens, shape.num_windowed_layers, shape.window_tokens)
        return flops / (request.ranks * request.tflops * 1e12 * PREFILL_EFFICIENCY)

    def config(self) -> Config:
        """The configuration that follows."""
        dram = None if self.dram_bytes == 0 and self.request.dram_bytes is None else self.dram_bytes // MIB
        return Config(
            enable=True,
            memory=MemoryConfig(
                hbm_reserve_mb=-(-self.reserve_bytes // MIB),
                dram_capacity_mb=dram,
                nvme_capacity_mb=self.nvme_bytes // MIB,
                staging_buffer_size_mb=self.staging_bytes // MIB,
            ),
            kv_block=KVBlockConfig(block_size=self.request.block_size, prefetch_window=4),
            policy=PolicyConfig(cold_threshold=0.8, swap_batch_size=self.batch_blocks),
        )


def speeds_of(profile: DeviceProfile, source: str) -> Speeds:
    """Speeds from a measured profile; what it lacks is assumed, and said."""
    assumed = ASSUMED_SPEEDS
    lacks = "" if profile.nvme_read is not None else "; NVMe was not measured and is assumed"
    return Speeds(
        profile.hbm_to_dram,
        profile.dram_to_hbm,
        profile.memcpy,
        profile.nvme_read or assumed.nvme_read,
        profile.nvme_write or assumed.nvme_write,
        f"measured on {profile.device} ({source}){lacks}",
    )


def make_plan(request: PlanRequest) -> Plan:
    """Compute a plan.

    Raises:
        CapacityError: weights and allowance leave no room for KV.
        ModelError: the KV heads cannot be divided among the ranks.
        RequestError: a figure asked for makes no sense.
    """
    _check(request)
    shape, ranks = request.shape, request.ranks
    block_bytes = shape.block_bytes(request.block_size, ranks)
    stride = shape.stride_bytes(request.block_size, ranks)
    activation = request.activation_bytes
    if activation is None:
        activation = max(MIN_ACTIVATION_BYTES, int(request.device_bytes * ACTIVATION_SHARE))
    reserve = _whole_mib(-(-request.weight_bytes // ranks) + activation)
    batch, staging, hbm_blocks = _fast_pool(request, reserve, block_bytes, stride)
    sequence = math.ceil(request.context_tokens / request.block_size)
    missing = max(0, request.concurrency * sequence - hbm_blocks)
    missing += min(batch, hbm_blocks // _MIN_BATCH_SHARE) + 1 if missing else 0  # room to exchange a batch
    dram, dram_blocks = _tier(request.dram_bytes, missing, stride, ranks)
    nvme, nvme_blocks = _tier(request.nvme_bytes, max(0, missing - dram_blocks), stride, ranks)
    return Plan(
        request=request,
        bytes_per_token=shape.bytes_per_token(ranks),
        block_bytes=block_bytes,
        stride_bytes=stride,
        reserve_bytes=reserve,
        activation_bytes=activation,
        staging_bytes=staging,
        hbm_blocks=hbm_blocks,
        dram_bytes=dram,
        nvme_bytes=nvme,
        dram_blocks=dram_blocks,
        nvme_blocks=nvme_blocks,
        batch_blocks=batch,
        sequence_blocks=sequence,
    )


def _fast_pool(request: PlanRequest, reserve: int, block_bytes: int, stride: int) -> tuple[int, int, int]:
    """``swap_batch_size``, bytes of host staging, and blocks in HBM."""
    room = request.device_bytes - reserve
    batch = PolicyConfig().swap_batch_size
    batch = max(1, min(batch, max(0, room) // block_bytes // _MIN_BATCH_SHARE))
    staging = min(_whole_mib(STAGING_BATCHES * batch * stride), _DEFAULT_MEMORY.staging_buffer_size_mb * MIB)
    blocks = room // block_bytes - DEVICE_STAGING_BATCHES * batch
    if blocks < 2:
        need = _devices_needed(request)
        remedy = f"at least {need} such devices are needed" if need else "more devices do not help"
        raise CapacityError(
            f"weights and allowance take {reserve / 2**30:.1f} GiB of the {request.device_bytes / 2**30:.1f} GiB of "
            f"each of {request.ranks} devices, which leaves no room for KV; {remedy}"
        )
    return batch, staging, blocks


def _devices_needed(request: PlanRequest) -> int | None:
    """The next power of two with which the weights leave a tenth of the device for KV; None if none does."""
    fixed = request.activation_bytes or max(MIN_ACTIVATION_BYTES, int(request.device_bytes * ACTIVATION_SHARE))
    for ranks in (2, 4, 8, 16, 32, 64, 128, 256, 512, 1024):
        if ranks > request.ranks and request.weight_bytes / ranks + fixed <= request.device_bytes * 0.9:
            return ranks
    return None


def _tier(given: int | None, missing_blocks: int, stride: int, ranks: int) -> tuple[int, int]:
    """Bytes for the machine, and blocks of one rank."""
    total = _whole_mib(missing_blocks * stride * ranks) if given is None else given // MIB * MIB
    return total, total // ranks // stride


def _whole_mib(num_bytes: int) -> int:
    return -(-num_bytes // MIB) * MIB


def _check(request: PlanRequest) -> None:
    allowed = request.shape.max_context_tokens
    if allowed and request.context_tokens > allowed:
        raise RequestError(
            f"a context of {request.context_tokens} is more than the {allowed} tokens that the model allows"
        )
    for name in ("context_tokens", "concurrency", "ranks", "device_bytes"):
        if getattr(request, name) < 1:
            raise RequestError(f"{name} must be at least 1")
