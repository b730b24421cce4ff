"""What a check is given: the machine, the configuration, and what several checks need to know of both."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from dflash2.config import Config, load_config
from dflash2.config.effective import DEFAULT_DRAM_SHARE, nvme_folders
from dflash2.doctor.devices import Device, DeviceReading, read_devices
from dflash2.doctor.machine import Machine
from dflash2.errors import ConfigError
from dflash2.host_memory import MemoryLimit, read_memory_limit
from dflash2.types import MIB


@dataclass(frozen=True, slots=True)
class ConfigReading:
    """A configuration file as it was found.

    Attributes:
        config: its values; the defaults if there is no file or it is not valid.
        source: the file's name; empty if none was named.
        problem: why the file is not valid; empty if it is.
    """

    config: Config
    source: str = ""
    problem: str = ""


@dataclass(frozen=True, slots=True)
class Case:
    """One examination.

    Attributes:
        machine: what is examined.
        reading: the configuration.
        ranks: ranks that share the machine.
        devices: what is known of its devices.
        memory_limit: what this process may use.
        block_bytes: bytes of a block on DRAM and NVMe, per rank; None if the model is not known.
    """

    machine: Machine
    reading: ConfigReading
    ranks: int
    devices: DeviceReading
    memory_limit: MemoryLimit
    block_bytes: int | None

    @property
    def config(self) -> Config:
        """The configuration's values."""
        return self.reading.config

    @property
    def dram_bytes(self) -> int:
        """Asked for the machine; by default the share that ``effective`` takes."""
        asked = self.config.memory.dram_capacity_mb
        return self.memory_limit.num_bytes // DEFAULT_DRAM_SHARE if asked is None else asked * MIB

    @property
    def nvme_bytes(self) -> int:
        """Asked for the machine."""
        return self.config.memory.nvme_capacity_mb * MIB

    @property
    def staging_bytes(self) -> int:
        """Upper bound, all ranks together."""
        return self.config.memory.staging_buffer_size_mb * MIB * self.ranks

    @property
    def nvme_paths(self) -> tuple[Path, ...]:
        """Folders of the NVMe files."""
        memory = self.config.memory
        return nvme_folders(memory.nvme_path, memory.nvme_paths, self.machine.environ)

    @property
    def nvme_path(self) -> Path:
        """The first of them: what is measured."""
        return self.nvme_paths[0]

    def kv_bytes(self, device: Device) -> int:
        """What is left for KV on an otherwise empty device; may be negative."""
        return device.total_bytes - self.config.memory.hbm_reserve_mb * MIB


def read_config(path: Path | None) -> ConfigReading:
    """Read a configuration file; a wrong one is something to report, not to stop at."""
    if path is None:
        return ConfigReading(Config())
    try:
        return ConfigReading(load_config(path), str(path))
    except ConfigError as error:
        return ConfigReading(Config(), str(path), str(error))


def open_case(machine: Machine, reading: ConfigReading, ranks: int = 1, block_bytes: int | None = None) -> Case:
    """Gather what the checks need.

    Raises:
        StorageError: the machine does not say how much memory it has.
    """
    return Case(machine, reading, ranks, read_devices(machine), read_memory_limit(machine.root), block_bytes)
