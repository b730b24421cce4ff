"""The disk under the NVMe tier: space, and what it says of its own health (SMART).

A sick disk may not answer for minutes, so nothing here is called by the thread that drives the engine.

Sources: NVM Express Base Specification 2.0, "SMART / Health Information" (log page 02h); Linux kernel,
``include/uapi/linux/nvme_ioctl.h``.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import re
import struct
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

INTERVAL_S = 60.0
"""SMART is asked for at most this often."""
_IOCTL_ADMIN = 0xC0484E41
_GET_LOG_PAGE, _SMART_LOG, _ALL_NAMESPACES = 0x02, 0x02, 0xFFFFFFFF
_LOG_BYTES = 512
_KELVIN = 273


class DiskWatch:
    """Space and health of the disk that holds a folder.

    Args:
        folder: absolute, existing.
        clock: monotonic seconds.
    """

    def __init__(self, folder: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self._folder = folder
        self._clock = clock
        self._smart: dict[str, Any] = {}
        self._next_smart = -float("inf")

    def read(self) -> dict[str, Any]:
        """Free space now, SMART of the last minute. May take as long as the disk does."""
        now = self._clock()
        if now >= self._next_smart:
            self._next_smart = now + INTERVAL_S
            self._smart = read_smart(self._folder.stat().st_dev)
        space = os.statvfs(self._folder)
        return {
            "path": str(self._folder),
            "free_bytes": space.f_bavail * space.f_frsize,
            "total_bytes": space.f_blocks * space.f_frsize,
            "smart": self._smart,
        }


def read_smart(device: int, root: Path = Path("/")) -> dict[str, Any]:
    """What the NVMe controller behind a block device (``st_dev``) says of itself.

    Args:
        device: the block device.
        root: where ``sys`` and ``dev`` are looked for.

    Returns:
        The figures of ``parse_smart``; or ``{"unreadable": reason}``.
    """
    entry = root / "sys/dev/block" / f"{os.major(device)}:{os.minor(device)}"
    match = re.search(r"/(nvme\d+)(?:c\d+)?n\d+(?:/|$)", str(entry.resolve()))
    if match is None:
        return {"unreadable": "the folder is not directly on an NVMe device"}
    try:
        fd = os.open(root / "dev" / match[1], os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        return {"unreadable": f"/dev/{match[1]}: {error.strerror or error}"}
    try:
        return parse_smart(_health_log(fd))
    except OSError as error:
        return {"unreadable": f"/dev/{match[1]}: {error.strerror or error}"}
    finally:
        os.close(fd)


def parse_smart(log: bytes) -> dict[str, Any]:
    """The figures of a SMART log page that matter to a cache: warnings, wear, temperature, errors, bytes written."""
    warning, kelvin, spare, spare_limit, used = struct.unpack_from("<BHBBB", log)
    written_units, media_errors = (int.from_bytes(log[at : at + 16], "little") for at in (48, 160))
    return {
        "critical_warning": warning,
        "temperature_celsius": kelvin - _KELVIN,
        "spare_ratio": spare / 100,
        "spare_limit_ratio": spare_limit / 100,
        "wear_ratio": used / 100,
        "written_bytes": written_units * 512_000,
        "media_errors": media_errors,
    }


def _health_log(fd: int) -> bytes:
    """Ask the controller. Raises OSError."""
    buffer = ctypes.create_string_buffer(_LOG_BYTES)
    dwords = _LOG_BYTES // 4 - 1
    command = struct.pack(
        "<BBHIIIQQIIIIIIIIII",
        *(_GET_LOG_PAGE, 0, 0, _ALL_NAMESPACES, 0, 0, 0, ctypes.addressof(buffer), 0, _LOG_BYTES),
        *(dwords << 16 | _SMART_LOG, 0, 0, 0, 0, 0, 0, 0),
    )
    status = fcntl.ioctl(fd, _IOCTL_ADMIN, bytearray(command))
    if status:
        raise OSError(None, f"the controller refused with status {status:#x}")
    return buffer.raw
