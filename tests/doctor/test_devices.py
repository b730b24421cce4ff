"""Reading nvidia-smi and the kernel's driver file."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.doctor.fake_machine import GOOD, NO_GPU, FakeGPU, changed

from dflash2.doctor.device_checks import number_list
from dflash2.doctor.devices import read_devices
from dflash2.types import MIB

FOUR = tuple(FakeGPU(index=i) for i in range(4))


def visible(value: str | None, root: Path) -> list[int]:
    environ = {} if value is None else {"CUDA_VISIBLE_DEVICES": value}
    reading = read_devices(changed(GOOD, gpus=FOUR, environ=environ).build(root))
    return [device.index for device in reading.devices]


@pytest.mark.parametrize(
    ("value", "indices"),
    [(None, [0, 1, 2, 3]), ("2,0", [2, 0]), ("", []), ("-1", []), ("1,9,2", [1]), ("GPU-3,GPU-1a", [3, 1])],
)
def test_visible_devices_are_chosen_as_cuda_does(value: str | None, indices: list[int], tmp_path: Path) -> None:
    assert visible(value, tmp_path) == indices


def test_a_device(tmp_path: Path) -> None:
    machine = changed(GOOD, processes=("GPU-0aaa, 12, a b, 300", "GPU-9, 13, other, 5"))
    reading = read_devices(machine.build(tmp_path))
    assert (reading.driver, reading.cuda, reading.problem) == ("550.54.15", "12.4", "")
    (device,) = reading.devices
    assert (device.total_bytes, device.used_bytes, device.pci_address) == (81920 * MIB, 4 * MIB, "0000:3b:00.0")
    assert [(process.pid, process.name, process.used_bytes) for process in reading.processes] == [
        (12, "a b", 300 * MIB)
    ]


@pytest.mark.parametrize(
    ("text", "version"),
    [
        ("NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.104.05  Sat Aug 19 01:15:15 UTC 2023", "535.104.05"),
        ("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  550.54.15  Release Build", "550.54.15"),
        ("NVRM version: NVIDIA UNIX Open Kernel Module for aarch64  570.86.15  Release Build", "570.86.15"),
        ("nonsense", "550.54.15"),  # nvidia-smi then says it
    ],
)
def test_driver_version(text: str, version: str, tmp_path: Path) -> None:
    machine = changed(GOOD, files={"proc/driver/nvidia/version": text}).build(tmp_path)
    assert read_devices(machine).driver == version


def test_a_driver_without_its_program(tmp_path: Path) -> None:
    machine = changed(NO_GPU, files={"proc/driver/nvidia/version": "Kernel Module  550.1.2  x"}).build(tmp_path)
    reading = read_devices(machine)
    assert reading.driver == "550.1.2"
    assert "nvidia-smi is not installed" in reading.problem


def test_no_driver_is_no_problem(tmp_path: Path) -> None:
    reading = read_devices(NO_GPU.build(tmp_path))
    assert (reading.devices, reading.driver, reading.problem) == ((), "", "")


@pytest.mark.parametrize(("text", "numbers"), [("0-2,5\n", {0, 1, 2, 5}), ("", set()), ("7", {7}), ("\t0\n", {0})])
def test_number_list(text: str, numbers: set[int]) -> None:
    assert number_list(text) == numbers
