"""What was measured of a machine, as a file that ``dflash2 plan`` reads."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from dflash2.errors import ConfigError, StorageError

PROFILE_FORMAT = 1


@dataclass(frozen=True, slots=True)
class DeviceProfile:
    """Bandwidths of one machine, in bytes per second; None where nothing could be measured.

    Attributes:
        device: what HBM was: the device's name, or ``cpu``.
        block_bytes: size of the blocks that were moved.
        memcpy: host memory to host memory.
        hbm_to_dram: a batch of blocks leaves the fast pool.
        dram_to_hbm: a batch of blocks enters it.
        nvme_write: a batch of blocks is stored, checksum included.
        nvme_read: a batch of blocks is loaded and verified.
        nvme_path: where; empty if NVMe was not measured.
        io_mode: ``direct`` or ``buffered``; empty if NVMe was not measured.
    """

    device: str
    block_bytes: int
    memcpy: float
    hbm_to_dram: float
    dram_to_hbm: float
    nvme_write: float | None = None
    nvme_read: float | None = None
    nvme_path: str = ""
    io_mode: str = ""

    def to_json(self) -> dict[str, Any]:
        """Every field; the keys of bandwidths end in ``_bytes_per_s``."""
        return {"format": PROFILE_FORMAT} | {_key(name): value for name, value in asdict(self).items()}


def write_profile(profile: DeviceProfile, path: Path) -> None:
    """Write the file. Raises StorageError."""
    try:
        path.write_text(json.dumps(profile.to_json(), indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        raise StorageError(f"cannot write {path}: {error.strerror or error}") from error


def read_profile(path: Path) -> DeviceProfile:
    """Read a file that ``write_profile`` wrote.

    Raises:
        ConfigError: it cannot be read, or is not such a file.
    """
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read the device profile {path}: {error}") from error
    remedy = "write it anew with `dflash2 doctor --probe --profile FILE`"
    if not isinstance(document, dict) or document.get("format") != PROFILE_FORMAT:
        raise ConfigError(f"{path} is not a device profile of format {PROFILE_FORMAT}; {remedy}")
    values: dict[str, Any] = {field.name: document.get(_key(field.name)) for field in fields(DeviceProfile)}
    wrong = [_key(name) for name, value in values.items() if not _is_valid(name, value)]
    if wrong:
        raise ConfigError(f"{path}: {', '.join(wrong)} missing or not a value of its kind; {remedy}")
    return DeviceProfile(**values)


_BANDWIDTHS = frozenset({"memcpy", "hbm_to_dram", "dram_to_hbm", "nvme_write", "nvme_read"})


def _key(name: str) -> str:
    return f"{name}_bytes_per_s" if name in _BANDWIDTHS else name


def _is_valid(name: str, value: object) -> bool:
    if name in ("device", "nvme_path", "io_mode"):
        return isinstance(value, str)
    if value is None:
        return name in ("nvme_write", "nvme_read")
    return isinstance(value, (int, float)) and not isinstance(value, bool) and value > 0
