"""Machines made of a file tree, an environment and scripted programs."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from dflash2.config import Config, parse_config
from dflash2.doctor.case import Case, ConfigReading, open_case
from dflash2.doctor.devices import APP_QUERY, GPU_QUERY, SUMMARY
from dflash2.doctor.machine import CommandOutput, DirectIO, DirectIOTrial, Machine, Space, TorchBuild

GIB = 1 << 30
MIB = 1 << 20
DRIVER = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  {}  Release Build  (builder)\nGCC version: 12\n"
NVME_PATH = "/nvme/dflash2"
REFERENCE = {
    "enable": True,
    "memory": {
        "hbm_reserve_mb": 20480,
        "dram_capacity_mb": 128000,
        "nvme_capacity_mb": 512000,
        "staging_buffer_size_mb": 512,
        "nvme_path": NVME_PATH,
    },
    "kv_block": {"block_size": 128, "prefetch_window": 4},
    "policy": {"cold_threshold": 0.8, "swap_batch_size": 32},
}
GOOD_TORCH = TorchBuild("2.6.0+cu124", "12.4")
DIRECT_IO_WORKS = DirectIOTrial(DirectIO.WORKS)
ROOT_MOUNT = "22 1 8:2 / / rw,relatime shared:1 - ext4 /dev/sda2 rw"
NVME_MOUNT = "30 22 259:1 / /nvme rw,noatime shared:2 - xfs /dev/nvme0n1p1 rw"


@dataclass(frozen=True)
class FakeGPU:
    """One row of nvidia-smi."""

    index: int = 0
    total_mib: int = 81920
    used_mib: int = 4
    bus: str = "00000000:3B:00.0"
    name: str = "NVIDIA A800-SXM4-80GB"

    @property
    def uuid(self) -> str:
        return f"GPU-{self.index}aaa"


@dataclass(frozen=True)
class FakeMachine:
    """What a test may change; the defaults are a good machine."""

    files: dict[str, str] = field(default_factory=dict)
    environ: dict[str, str] = field(default_factory=lambda: {"HOME": "/home/user"})
    mounts: tuple[str, ...] = (ROOT_MOUNT, NVME_MOUNT)
    gpus: tuple[FakeGPU, ...] = (FakeGPU(),)
    processes: tuple[str, ...] = ()
    driver: str = "550.54.15"
    cuda: str = "12.4"
    smi_failure: str = ""
    torch: TorchBuild | None = GOOD_TORCH
    space: dict[str, Space] = field(
        default_factory=lambda: {"/nvme": Space(3000 * GIB, 2000 * GIB), "/dev/shm": Space(128 * GIB, 128 * GIB)}
    )
    direct_io: DirectIOTrial = DIRECT_IO_WORKS
    copier_problem: str = ""

    def build(self, root: Path) -> Machine:
        """Write the tree below ``root``."""
        _disk(root, "nvme0n1", "259:0", partition="259:1", transport="pcie")
        _disk(root, "sda", "8:0", partition="8:2", rotational="1")
        files = {
            "proc/meminfo": f"MemTotal: {256 * MIB} kB\nMemFree: 1 kB\nMemAvailable: {240 * MIB} kB\n",
            "proc/self/cgroup": "0::/user.slice\n",
            "proc/self/mountinfo": "\n".join(self.mounts) + "\n",
            "proc/self/status": "Name:\tpython\nCapEff:\t0000000000000000\nCpus_allowed_list:\t0-63\n"
            "Mems_allowed_list:\t0\n",
            "proc/self/limits": _limits("unlimited"),
            "sys/devices/system/node/node0/cpulist": "0-63\n",
            "sys/bus/pci/devices/0000:3b:00.0/numa_node": "0\n",
            "dev/shm/.keep": "",
            "nvme/.keep": "",
        }
        if self.driver:
            files["proc/driver/nvidia/version"] = DRIVER.format(self.driver)
        for name, text in (files | self.files).items():
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            (root / name).write_text(text, encoding="utf-8")
        return Machine(
            root,
            self.environ,
            self.run,
            self._space,
            lambda folder: self.direct_io,
            lambda: self.torch,
            lambda: self.copier_problem,
        )

    def run(self, argv: Sequence[str]) -> CommandOutput | None:
        """nvidia-smi; absent without a driver."""
        if not self.driver:
            return None
        if self.smi_failure:
            return CommandOutput(False, self.smi_failure)
        if tuple(argv) == GPU_QUERY:
            rows = [
                f"{g.index}, {g.uuid}, {g.name}, {g.total_mib}, {g.used_mib}, {g.bus}, {self.driver}" for g in self.gpus
            ]
            return CommandOutput(True, "\n".join(rows) + "\n")
        if tuple(argv) == APP_QUERY:
            return CommandOutput(True, "".join(f"{row}\n" for row in self.processes))
        assert tuple(argv) == SUMMARY
        return CommandOutput(
            True, f"| NVIDIA-SMI {self.driver}  Driver Version: {self.driver}  CUDA Version: {self.cuda} |"
        )

    def _space(self, path: Path) -> Space:
        return next(space for prefix, space in self.space.items() if path.is_relative_to(prefix))

    def case(
        self, root: Path, document: dict[str, object] | None = None, ranks: int = 1, block_bytes: int | None = None
    ) -> Case:
        """Open it with a configuration, by default the reference one."""
        config = config_of(REFERENCE if document is None else document)
        return open_case(self.build(root), ConfigReading(config, "dflash2_config.json"), ranks, block_bytes)


NO_GPU = FakeMachine(driver="", gpus=(), torch=TorchBuild("2.6.0+cpu", ""))
GOOD = FakeMachine()


def config_of(document: dict[str, object]) -> Config:
    """Parse a document as a file would be."""
    return parse_config(json.dumps(document))


def reference(**memory: object) -> dict[str, object]:
    """The reference configuration with other values in ``memory``."""
    return REFERENCE | {"memory": REFERENCE["memory"] | memory}  # type: ignore[operator]


def changed(machine: FakeMachine, **fields: object) -> FakeMachine:
    """A copy with other fields; ``files``, ``environ`` and ``space`` are added to."""
    for name in ("files", "environ", "space"):
        if name in fields:
            fields[name] = getattr(machine, name) | fields[name]  # type: ignore[operator]
    return replace(machine, **fields)  # type: ignore[arg-type]


def limits(memlock: str) -> dict[str, str]:
    """The file with a memlock limit."""
    return {"proc/self/limits": _limits(memlock)}


def _limits(memlock: str) -> str:
    return (
        "Limit                     Soft Limit           Hard Limit           Units     \n"
        f"Max locked memory         {memlock:<20} {memlock:<20} bytes     \n"
        "Max file locks            unlimited            unlimited            locks     \n"
    )


def _disk(
    root: Path, name: str, number: str, *, partition: str = "", rotational: str = "0", transport: str = ""
) -> None:
    device = root / "sys/devices/pci0000:00" / name / "block" / name
    (device / "queue").mkdir(parents=True)
    (device / "queue/rotational").write_text(f"{rotational}\n", encoding="ascii")
    (device / "device").mkdir()
    if transport:
        (device / "device/transport").write_text(f"{transport}\n", encoding="ascii")
    link(root, name, number, device)
    if partition:
        part = f"{name}p1" if name[-1].isdigit() else f"{name}2"
        (device / part).mkdir()
        (device / part / "partition").write_text("1\n", encoding="ascii")
        link(root, part, partition, device / part)


def link(root: Path, name: str, number: str, device: Path) -> None:
    """Make a device known by its number and its name, as sysfs does with relative links."""
    for folder, entry in (("sys/dev/block", number), ("sys/class/block", name)):
        (root / folder).mkdir(parents=True, exist_ok=True)
        (root / folder / entry).symlink_to(Path("../" * len(Path(folder).parts)) / device.relative_to(root))


def mapped_disk(root: Path, name: str, number: str, below: Sequence[str]) -> None:
    """A mapping or RAID over other disks of the tree."""
    device = root / "sys/devices/virtual/block" / name
    (device / "slaves").mkdir(parents=True)
    (device / "queue").mkdir()
    (device / "queue/rotational").write_text("0\n", encoding="ascii")
    for other in below:
        target = (root / "sys/class/block" / other).resolve()
        (device / "slaves" / other).symlink_to(target)
    link(root, name, number, device)
