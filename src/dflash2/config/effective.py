"""What a configuration means on this machine: bytes per machine, per rank and per device, and the lines that say so."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pydantic import BaseModel

from dflash2.config.schema import Config
from dflash2.errors import ConfigError
from dflash2.host_memory import MemoryLimit, read_memory_limit
from dflash2.types import MIB, PAGE_BYTES

DEFAULT_DRAM_SHARE = 4
"""Without ``dram_capacity_mb`` DRAM gets one part in so many of what the process may use: room for weights on
their way to the device, the page cache and the engine itself remains without anybody having to measure it."""

_UNITS = {"_mb": "MiB", "_s": "s", "_tokens": "tokens", "block_size": "tokens"}
_UNIT_OF_BLOCKS = ("prefetch_window", "swap_batch_size")


@dataclass(frozen=True, slots=True)
class EffectiveConfig:
    """A configuration with every default resolved, for one rank.

    Attributes:
        config: the file as written.
        world_size: ranks of the whole model.
        rank: this rank, from 0.
        ranks_per_machine: ranks that share this machine's DRAM and NVMe.
        memory_limit: what this process may use of the machine's memory.
        hbm_reserve_bytes: per device, left to weights and activations.
        hbm_capacity_bytes: per device, size of the fast pool; None: the device's memory less reserve and staging.
        staging_buffer_bytes: per device, upper bound.
        dram_machine_bytes: for all ranks of the machine.
        dram_rank_bytes: this rank's share, a multiple of ``PAGE_BYTES``; the same on every rank.
        nvme_machine_bytes: for all ranks of the machine; 0 means no NVMe tier.
        nvme_rank_bytes: this rank's share, a multiple of ``PAGE_BYTES``; the same on every rank.
        nvme_daily_write_bytes: this rank's share of what may be written to NVMe a day; None: no limit.
        nvme_paths: absolute folders for the NVMe files, ascending, so that the order in the file does not matter; they
            may not exist yet.
    """

    config: Config
    world_size: int
    rank: int
    ranks_per_machine: int
    memory_limit: MemoryLimit
    hbm_reserve_bytes: int
    hbm_capacity_bytes: int | None
    staging_buffer_bytes: int
    dram_machine_bytes: int
    dram_rank_bytes: int
    nvme_machine_bytes: int
    nvme_rank_bytes: int
    nvme_daily_write_bytes: int | None
    nvme_paths: tuple[Path, ...]

    @property
    def nvme_path(self) -> Path:
        """The folder for what there is once, such as the history."""
        return self.nvme_paths[0]

    def describe(self) -> list[str]:
        """One line per key, with its unit, its scope and whether it is the default."""
        limit = self.memory_limit
        first = f"rank {self.rank} of {self.world_size}, {self.ranks_per_machine} on this machine"
        lines = [f"{first}; memory limit {_gb(limit.num_bytes)} ({limit.source})"]
        for name, value in self.config:
            if isinstance(value, BaseModel):
                lines += [self._line(name, key, value) for key in type(value).model_fields]
            else:
                lines.append(f"{name} = {_text(value)}{_default_mark(self.config, name)}")
        return lines

    def _line(self, section_name: str, key: str, section: BaseModel) -> str:
        value = self._resolved().get(key) or f"{_text(getattr(section, key))}{_unit(key)}"
        return f"{section_name}.{key} = {value}{_default_mark(section, key)}"

    def _resolved(self) -> dict[str, str]:
        """Wording of the values that depend on the machine or the number of ranks."""
        ranks = f"({self.ranks_per_machine} rank{'s' if self.ranks_per_machine > 1 else ''})"
        capacity = self.hbm_capacity_bytes
        return {
            "hbm_reserve_mb": f"{_size(self.hbm_reserve_bytes)} per device",
            "hbm_capacity_mb": "the device's memory less reserve and staging"
            if capacity is None
            else f"{_size(capacity)} per device",
            "staging_buffer_size_mb": f"at most {_size(self.staging_buffer_bytes)} per device",
            "dram_capacity_mb": f"{_size(self.dram_machine_bytes)} per machine, "
            f"{_gb(self.dram_rank_bytes)} per rank {ranks}",
            "nvme_capacity_mb": f"{_size(self.nvme_machine_bytes)} per machine, "
            f"{_gb(self.nvme_rank_bytes)} per rank {ranks}",
            "nvme_daily_write_mb": "no limit"
            if self.nvme_daily_write_bytes is None
            else f"{_size(self.nvme_daily_write_bytes * self.ranks_per_machine)} per machine",
            **self._resolved_paths(),
        }

    def _resolved_paths(self) -> dict[str, str]:
        paths = ", ".join(map(str, self.nvme_paths))
        if self.config.memory.nvme_paths is None:
            return {"nvme_path": paths, "nvme_paths": "nvme_path alone"}
        part = self.nvme_machine_bytes // len(self.nvme_paths)
        return {"nvme_path": "see nvme_paths", "nvme_paths": f"{paths}, {_gb(part)} on each"}


def effective(
    config: Config,
    world_size: int = 1,
    rank: int = 0,
    *,
    ranks_per_machine: int | None = None,
    memory_limit: MemoryLimit | None = None,
) -> EffectiveConfig:
    """Resolve a configuration for one rank.

    Args:
        config: as read.
        world_size: ranks of the whole model.
        rank: this one, ``0 <= rank < world_size``.
        ranks_per_machine: ranks that share this machine; by default all of them.
        memory_limit: what the machine gives this process; by default it is read from the cgroup.

    Raises:
        ConfigError: DRAM and staging together are more than this process may use, or no cache folder can be found.
        StorageError: the size of the machine's memory cannot be read.
        ValueError: the ranks contradict each other.
    """
    ranks = world_size if ranks_per_machine is None else ranks_per_machine
    if not (0 <= rank < world_size and 1 <= ranks <= world_size):
        raise ValueError(f"rank {rank} of {world_size} with {ranks} on this machine")
    limit = memory_limit or read_memory_limit()
    memory = config.memory
    dram = limit.num_bytes // DEFAULT_DRAM_SHARE // MIB if memory.dram_capacity_mb is None else memory.dram_capacity_mb
    nvme = memory.nvme_capacity_mb
    _check_fits(dram, memory.staging_buffer_size_mb * ranks, limit)
    return EffectiveConfig(
        config=config,
        world_size=world_size,
        rank=rank,
        ranks_per_machine=ranks,
        memory_limit=limit,
        hbm_reserve_bytes=memory.hbm_reserve_mb * MIB,
        hbm_capacity_bytes=None if memory.hbm_capacity_mb is None else memory.hbm_capacity_mb * MIB,
        staging_buffer_bytes=memory.staging_buffer_size_mb * MIB,
        dram_machine_bytes=dram * MIB,
        dram_rank_bytes=_share(dram * MIB, ranks),
        nvme_machine_bytes=nvme * MIB,
        nvme_rank_bytes=_share(nvme * MIB, ranks),
        nvme_daily_write_bytes=None
        if memory.nvme_daily_write_mb is None
        else memory.nvme_daily_write_mb * MIB // ranks,
        nvme_paths=nvme_folders(memory.nvme_path, memory.nvme_paths),
    )


def _check_fits(dram_mb: int, staging_mb: int, limit: MemoryLimit) -> None:
    if (dram_mb + staging_mb) * MIB <= limit.num_bytes:
        return
    allowed = limit.num_bytes // MIB
    name, other = ("dram_capacity_mb", staging_mb) if dram_mb >= staging_mb else ("staging_buffer_size_mb", dram_mb)
    raise ConfigError(
        f"{dram_mb} MiB of DRAM and {staging_mb} MiB of staging are more than the {allowed} MiB ({limit.source}) "
        f"that this process may use; beside the other {other} MiB at most {max(0, allowed - other)} MiB are left",
        f"memory.{name}",
    )


def _share(total_bytes: int, ranks: int) -> int:
    """Equal shares: every rank must decide the same, so none may have a block more."""
    return total_bytes // ranks // PAGE_BYTES * PAGE_BYTES


def nvme_folders(
    path: str | None, paths: Sequence[str] | None, environ: Mapping[str, str] = os.environ
) -> tuple[Path, ...]:
    """The folders of the NVMe files, ascending.

    Args:
        path: ``memory.nvme_path``.
        paths: ``memory.nvme_paths``.
        environ: where the user's folders are looked up.

    Raises:
        ConfigError: nothing is written and the home folder is not known.
    """
    if paths is not None:
        return tuple(sorted(Path(os.path.normpath(written)) for written in paths))
    return (_nvme_folder(path, environ),)


def _nvme_folder(written: str | None, environ: Mapping[str, str]) -> Path:
    if written is not None:
        return Path(os.path.normpath(written))
    cache = environ.get("XDG_CACHE_HOME", "")
    if os.path.isabs(cache):  # noqa: PTH117 - the XDG base directory specification has a relative one ignored
        return Path(cache) / "dflash2"
    if os.path.isabs(environ.get("HOME", "")):  # noqa: PTH117
        return Path(environ["HOME"]) / ".cache" / "dflash2"
    try:
        return Path.home() / ".cache" / "dflash2"
    except RuntimeError as error:
        raise ConfigError("the user's home folder is not known; write an absolute path", "memory.nvme_path") from error


def _gb(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:.1f}GB"


def _size(num_bytes: int) -> str:
    return f"{num_bytes // MIB} MiB ({_gb(num_bytes)})"


def _text(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _unit(key: str) -> str:
    if key in _UNIT_OF_BLOCKS:
        return " blocks"
    return next((f" {unit}" for suffix, unit in _UNITS.items() if key.endswith(suffix)), "")


def _default_mark(section: BaseModel, key: str) -> str:
    return "" if key in section.model_fields_set and getattr(section, key) is not None else " (default)"
