"""What nvidia-smi and the kernel say about the NVIDIA devices of a machine.

Sources: ``nvidia-smi --help-query-gpu`` and ``--help-query-compute-apps``; the CUDA C Programming Guide for
``CUDA_VISIBLE_DEVICES``.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from dflash2.doctor.machine import CommandOutput, Machine
from dflash2.types import MIB

_GPU_FIELDS = "index,uuid,name,memory.total,memory.used,pci.bus_id,driver_version"
_APP_FIELDS = "gpu_uuid,pid,process_name,used_memory"
_CSV = "--format=csv,noheader,nounits"
GPU_QUERY = ("nvidia-smi", f"--query-gpu={_GPU_FIELDS}", _CSV)
APP_QUERY = ("nvidia-smi", f"--query-compute-apps={_APP_FIELDS}", _CSV)
SUMMARY = ("nvidia-smi",)


@dataclass(frozen=True, slots=True)
class Device:
    """One NVIDIA device that this process may use.

    Attributes:
        index: as nvidia-smi counts.
        uuid: its identity.
        name: the model.
        total_bytes: its memory.
        used_bytes: held now by whatever process.
        pci_address: as sysfs spells it, such as ``0000:3b:00.0``.
    """

    index: int
    uuid: str
    name: str
    total_bytes: int
    used_bytes: int
    pci_address: str


@dataclass(frozen=True, slots=True)
class DeviceProcess:
    """A process on a device; ``used_bytes`` is None where the driver does not say."""

    uuid: str
    pid: int
    name: str
    used_bytes: int | None


@dataclass(frozen=True, slots=True)
class DeviceReading:
    """All that is known about the devices.

    Attributes:
        devices: those that ``CUDA_VISIBLE_DEVICES`` leaves.
        processes: on those devices, as far as this process may see them.
        driver: version; empty if there is no driver.
        cuda: the newest CUDA version that the driver supports; empty if unknown.
        problem: why the devices cannot be read although there is a driver; empty if all is well.
    """

    devices: tuple[Device, ...] = ()
    processes: tuple[DeviceProcess, ...] = ()
    driver: str = ""
    cuda: str = ""
    problem: str = ""


def read_devices(machine: Machine) -> DeviceReading:
    """Ask the machine. Without a driver the reading is empty."""
    driver = _kernel_driver(machine)
    answer = machine.run(GPU_QUERY)
    if answer is None:
        missing = "the kernel driver is loaded, but nvidia-smi is not installed here" if driver else ""
        return DeviceReading(driver=driver, problem=missing)
    if not answer.ok:
        return DeviceReading(driver=driver, problem=f"nvidia-smi fails: {_first_line(answer.text)}")
    rows = _rows(answer.text, len(_GPU_FIELDS.split(",")))
    every = [_device(row) for row in rows]
    devices = _visible(every, machine.environ.get("CUDA_VISIBLE_DEVICES"))
    uuids = {device.uuid for device in devices}
    processes = tuple(process for process in _processes(machine.run(APP_QUERY)) if process.uuid in uuids)
    return DeviceReading(devices, processes, driver or (rows[0][6] if rows else ""), _driver_cuda(machine))


def _kernel_driver(machine: Machine) -> str:
    text = machine.read("/proc/driver/nvidia/version") or ""
    match = re.search(r"Kernel Module\D*?(?:x86_64|aarch64)?\s+(\d+\.\d+(?:\.\d+)?)\s", f"{text}\n")
    return match[1] if match else ""


def _driver_cuda(machine: Machine) -> str:
    answer = machine.run(SUMMARY)
    match = re.search(r"CUDA Version\s*:\s*(\d+\.\d+)", answer.text) if answer is not None and answer.ok else None
    return match[1] if match else ""


def _rows(text: str, width: int) -> list[list[str]]:
    rows = [[cell.strip() for cell in line.split(",")] for line in text.splitlines()]
    return [row for row in rows if len(row) == width]


def _device(row: list[str]) -> Device:
    index, uuid, name, total, used, bus, _ = row
    domain, _, rest = bus.lower().partition(":")
    return Device(int(index), uuid, name, _mib(total) or 0, _mib(used) or 0, f"{domain[-4:]}:{rest}")


def _processes(answer: CommandOutput | None) -> list[DeviceProcess]:
    if answer is None or not answer.ok:
        return []
    rows = _rows(answer.text, len(_APP_FIELDS.split(",")))
    return [DeviceProcess(uuid, int(pid), name, _mib(used)) for uuid, pid, name, used in rows if pid.isdigit()]


def _mib(text: str) -> int | None:
    return int(text) * MIB if text.isdigit() else None


def _visible(devices: Sequence[Device], wanted: str | None) -> tuple[Device, ...]:
    """CUDA stops at the first entry that names no device; an empty variable hides all."""
    if wanted is None:
        return tuple(devices)
    chosen: list[Device] = []
    for entry in (part.strip() for part in wanted.split(",")):
        found = next((d for d in devices if entry and (entry == str(d.index) or d.uuid.startswith(entry))), None)
        if found is None:
            break
        chosen.append(found)
    return tuple(chosen)


def _first_line(text: str) -> str:
    return text.strip().splitlines()[0] if text.strip() else "no output"
