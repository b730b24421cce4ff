"""Schema of ``dflash2_config.json``: one model per section, strict, closed and frozen.

Every key is optional. ``*_mb`` are MiB, ``*_s`` seconds, ``*_tokens`` tokens. A new section is a new model and one
field of ``Config``; nothing else changes.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator

MAX_MB = 1 << 30
"""1 PiB: larger figures are bytes written where MiB are meant."""
MAX_PATHS = 16

Mebibytes = Annotated[int, Field(ge=0, le=MAX_MB)]
Share = Annotated[float, Field(ge=0.0, le=1.0)]


def _is_unicode(text: str) -> bool:
    """False for a lone surrogate, which JSON can spell and no file name can hold."""
    return not any("\ud800" <= character <= "\udfff" for character in text)


def _nvme_path(value: str, info: ValidationInfo) -> str:
    if not value or "\0" in value or not _is_unicode(value):
        raise ValueError("not a path")
    if value.startswith("/"):
        return value
    base = (info.context or {}).get("base_dir", Path.cwd())
    meant = os.path.normpath(Path(base) / Path(os.path.expandvars(value)).expanduser())
    raise ValueError(
        f'"{value}" is relative, and what it is relative to changes under systemd and `docker exec`; '
        f'write the absolute path, probably "{meant}"'
    )


class Section(BaseModel):
    """What every object of the file has in common."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, allow_inf_nan=False)


class MemoryConfig(Section):
    """How much of each tier. DRAM and NVMe are for the machine, everything else is per device."""

    hbm_reserve_mb: Mebibytes = 20480
    """Device memory left to weights and activations; the rest, less device-side staging, is for KV."""
    hbm_capacity_mb: Mebibytes | None = None
    """Size of the fast pool per device; needed where the device has no memory of its own (CPU), a cap elsewhere."""
    dram_capacity_mb: Mebibytes | None = None
    """For the machine, divided among its ranks. Absent: a quarter of what this process may use."""
    nvme_capacity_mb: Mebibytes = 0
    """For the machine, divided among its ranks. 0: no NVMe tier."""
    nvme_daily_write_mb: Annotated[int, Field(ge=1, le=MAX_MB)] | None = None
    """For the machine: how much may be written to NVMe a day, for the device's endurance. Absent: no limit."""
    nvme_path: str | None = None
    """Absolute path of the folder of the NVMe files. Absent: ``dflash2`` in the user's cache folder."""
    nvme_paths: Annotated[list[str], Field(min_length=1, max_length=MAX_PATHS)] | None = None
    """Instead of ``nvme_path``: absolute paths of folders on several disks. Each gets an equal part of the capacity."""
    staging_buffer_size_mb: Annotated[int, Field(ge=1, le=MAX_MB)] = 512
    """Upper bound of the buffer that swaps go through, per device."""

    @field_validator("hbm_capacity_mb")
    @classmethod
    def _not_zero(cls, value: int | None) -> int | None:
        if value == 0:
            raise ValueError(
                "a pool of 0 MiB holds no block; leave the key out to take the device's memory less hbm_reserve_mb"
            )
        return value

    @field_validator("nvme_path")
    @classmethod
    def _absolute(cls, value: str | None, info: ValidationInfo) -> str | None:
        return None if value is None else _nvme_path(value, info)

    @field_validator("nvme_paths")
    @classmethod
    def _several(cls, values: list[str] | None, info: ValidationInfo) -> list[str] | None:
        paths = [os.path.normpath(_nvme_path(value, info)) for value in values or []]
        for path in paths:
            if paths.count(path) > 1:
                raise ValueError(f'"{path}" is named twice; name each disk once')
        if values is not None and info.data.get("nvme_path") is not None:
            raise ValueError("write either nvme_path or nvme_paths")
        return values


class KVBlockConfig(Section):
    """The unit in which KV is kept and moved."""

    block_size: Annotated[int, Field(ge=8, le=1024)] = 128
    """Tokens per block, a power of two."""
    prefetch_window: Annotated[int, Field(ge=4, le=8)] = 4
    """Blocks fetched ahead; widens to 8 by itself while prefetches are used and HBM has room."""

    @field_validator("block_size")
    @classmethod
    def _power_of_two(cls, value: int) -> int:
        if value & (value - 1):
            below = 1 << (value.bit_length() - 1)
            raise ValueError(f"{value} is not a power of two; the nearest are {below} and {2 * below}")
        return value


class PolicyConfig(Section):
    """What counts as cold and when blocks leave HBM."""

    eviction: Literal["heat", "lru"] = "heat"
    """``lru`` is the first generation's policy, kept as the baseline."""
    cold_threshold: Share = 0.8
    """A block whose heat is below this may be demoted."""
    swap_batch_size: Annotated[int, Field(ge=1, le=4096)] = 32
    """Blocks that leave or arrive in one burst; more of small ones, up to 16 MiB."""
    adaptive: bool = True
    """Lets the effective threshold move down while demoted blocks come back soon."""
    high_watermark: Annotated[float, Field(gt=0.0, le=1.0)] = 0.95
    """Share of used HBM slots at which demotion starts."""
    low_watermark: Annotated[float, Field(gt=0.0, le=1.0, validate_default=True)] = 0.90
    """Share of used HBM slots at which demotion stops."""
    refresh_interval_s: Annotated[float, Field(ge=0.01, le=3600.0)] = 1.0
    """Time between two computations of heat."""

    @field_validator("low_watermark")
    @classmethod
    def _below_high(cls, value: float, info: ValidationInfo) -> float:
        high = info.data.get("high_watermark")  # absent when it is wrong itself
        if high is not None and value >= high:
            raise ValueError(f"{value} must be below high_watermark, which is {high}")
        return value


class SchedulingConfig(Section):
    """How the reference engine shares its steps among requests."""

    quantum_tokens: Annotated[int, Field(ge=1, le=1 << 20)] = 32
    """Decode steps for which a running sequence keeps its place while others are swapped out."""
    max_batch_tokens: Annotated[int, Field(ge=1, le=1 << 20)] = 512
    """New tokens in one step, prefill chunks and decodes together."""
    max_running: Annotated[int, Field(ge=1, le=1 << 16)] = 256
    """Sequences that run at the same time."""
    admission_timeout_s: Annotated[float, Field(gt=0.0, le=86400.0)] = 60.0
    """How long a request may wait for its reservation."""
    max_waiting: Annotated[int, Field(ge=1, le=1 << 20)] = 1024
    """Requests that may wait for a reservation; more are refused with 429."""
    order: Literal["short_first", "first_come"] = "short_first"
    """``short_first`` lets short requests pass long ones, each long one by no more than its own length."""
    reserve: Literal["estimate", "max_tokens", "prompt"] = "estimate"
    """What is reserved for an answer: what such requests have needed, the most it may need, or nothing ahead."""
    smoothing: bool = True
    """While HBM is short, requests that have had a turn go on when others end: a short burst is not swapped."""
    smoothing_order: Annotated[int, Field(ge=1, le=8)] = 2
    """Order of the Butterworth low-pass over demand."""
    smoothing_cutoff: Annotated[float, Field(gt=0.0, lt=0.5)] = 0.0001
    """Its cut-off in cycles per step; demand that lasts ``0.35 / smoothing_cutoff`` steps takes turns."""


class PipelineConfig(Section):
    """How requests are made ready while the model is running. SGLang has its own; this is for the reference engine."""

    enabled: bool = True
    """Tokenises together what arrives together, and fetches cached prefixes at arrival. ``false`` to compare."""
    ring_tokens: Annotated[int, Field(ge=1 << 12, le=1 << 30)] = 1 << 22
    """Token ids of all prompts together, and of answers as far as there is room, at 4 bytes each. A prompt that finds
    no room waits, for ``scheduling.admission_timeout_s`` at most."""
    max_requests: Annotated[int, Field(ge=1, le=1 << 20)] = 1024
    """Requests being made ready; more are refused with 429."""


class LoraConfig(Section):
    """LoRA adapters of the reference engine. Without any key here no memory is taken for them."""

    adapters: dict[str, str] = {}
    """Adapters that are there from the start: name to absolute path of a folder that peft wrote."""
    directory: str | None = None
    """Absolute path of the folder from which clients may load adapters while the server runs. Absent: from none."""
    max_loaded: Annotated[int, Field(ge=1, le=1024)] = 4
    """Adapters on the device at a time. Their memory is taken at start, beside the weights (``hbm_reserve_mb``)."""
    max_rank: Annotated[int, Field(ge=1, le=512)] = 16
    """Largest rank."""
    dram_capacity_mb: Mebibytes = 1024
    """Copies of adapters in DRAM, beside ``memory.dram_capacity_mb``; it grows to this as they are used."""

    @field_validator("directory")
    @classmethod
    def _absolute_directory(cls, value: str | None) -> str | None:
        return value if value is None else _absolute_path(value)

    @field_validator("adapters")
    @classmethod
    def _absolute_adapters(cls, value: dict[str, str]) -> dict[str, str]:
        return {name: _absolute_path(path) for name, path in value.items()}


def _absolute_path(path: str) -> str:
    if not path.startswith("/") or "\0" in path or not _is_unicode(path):
        raise ValueError(f'"{path}" is no absolute path')
    return path


class Config(Section):
    """The whole file, as it was written; what it means on a machine is ``dflash2.config.effective``."""

    enable: bool = False
    """Must be literally ``true``; otherwise the engine runs unchanged."""
    history_enabled: bool = False
    """Keeps the history behind the curves of the monitoring page."""
    page_port: Annotated[int, Field(ge=1024, le=65535)] | None = None
    """Loopback port of the monitoring page beside an engine with a server of its own (SGLang); rank r of a machine
    takes the r-th after it. Absent: no page there."""
    memory: MemoryConfig = MemoryConfig()
    kv_block: KVBlockConfig = KVBlockConfig()
    policy: PolicyConfig = PolicyConfig()
    scheduling: SchedulingConfig = SchedulingConfig()
    pipeline: PipelineConfig = PipelineConfig()
    lora: LoraConfig = LoraConfig()
