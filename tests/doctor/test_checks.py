"""Every check both ways: what makes it pass, what makes it complain, and the words that help."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.doctor.fake_machine import (
    GIB,
    GOOD,
    MIB,
    NO_GPU,
    NVME_MOUNT,
    REFERENCE,
    ROOT_MOUNT,
    FakeGPU,
    FakeMachine,
    changed,
    config_of,
    limits,
    link,
    mapped_disk,
    reference,
)

from dflash2.doctor.case import ConfigReading, open_case
from dflash2.doctor.checks import CHECKS
from dflash2.doctor.findings import Finding, Status
from dflash2.doctor.machine import DirectIO, DirectIOTrial, Space, TorchBuild

OK, WARN, ERROR, SKIPPED = Status.OK, Status.WARN, Status.ERROR, Status.SKIPPED
Row = tuple[str, FakeMachine, dict[str, object], Status, str]


def policy(**values: object) -> dict[str, object]:
    return REFERENCE | {"policy": values}


def window(value: int) -> dict[str, object]:
    return REFERENCE | {"kv_block": {"prefetch_window": value}}


def nvme_on(mount: str) -> FakeMachine:
    return changed(GOOD, mounts=(ROOT_MOUNT, f"30 22 {mount}"))


def env(**values: str) -> FakeMachine:
    return changed(GOOD, environ=values)


def numa(cpus: str, mems: str = "0-1", device_node: str = "1") -> FakeMachine:
    return changed(
        GOOD,
        files={
            "sys/devices/system/node/node0/cpulist": "0-31\n",
            "sys/devices/system/node/node1/cpulist": "32-63\n",
            "sys/bus/pci/devices/0000:3b:00.0/numa_node": f"{device_node}\n",
            "proc/self/status": f"CapEff:\t0\nCpus_allowed_list:\t{cpus}\nMems_allowed_list:\t{mems}\n",
        },
    )


def used(mib: int, *processes: str) -> FakeMachine:
    return changed(GOOD, gpus=(FakeGPU(used_mib=mib),), processes=processes)


def meminfo(available_gib: int) -> dict[str, str]:
    return {"proc/meminfo": f"MemTotal: {256 * MIB} kB\nMemAvailable: {available_gib * MIB} kB\n"}


D = REFERENCE
SHM = {"/dev/shm": Space(GIB - 1, GIB - 1)}
ROWS: list[Row] = [
    ("config-file", GOOD, D, OK, "is valid"),
    ("config-file", GOOD, D | {"enable": False}, WARN, "enable is not true"),
    ("paths-absolute", GOOD, D, OK, "/nvme/dflash2"),
    ("paths-absolute", GOOD, {}, OK, "/home/user/.cache/dflash2"),
    ("paths-absolute", env(XDG_CACHE_HOME="/cache"), {}, OK, "/cache/dflash2"),
    ("paths-absolute", env(XDG_CACHE_HOME="cache"), {}, WARN, "XDG_CACHE_HOME=cache is relative"),
    ("driver-version", changed(GOOD, driver="535.54.03"), D, OK, "535.54.03"),
    ("driver-version", changed(GOOD, driver="530.41.03"), D, ERROR, "driver 535 or newer"),
    ("driver-version", NO_GPU, D, SKIPPED, "no NVIDIA driver"),
    ("devices-readable", GOOD, D, OK, "NVIDIA A800-SXM4-80GB, 81920 MiB"),
    ("devices-readable", changed(GOOD, smi_failure="Failed to initialize NVML"), D, ERROR, "Failed to initialize NVML"),
    ("devices-readable", env(CUDA_VISIBLE_DEVICES=""), D, ERROR, "CUDA_VISIBLE_DEVICES"),
    ("devices-readable", env(CUDA_VISIBLE_DEVICES="GPU-0a"), D, OK, "0: NVIDIA"),
    ("cuda-version", GOOD, D, OK, "supports CUDA 12.4, PyTorch is built for 12.4"),
    ("cuda-version", changed(GOOD, cuda="12.3"), D, ERROR, "supports CUDA 12.3"),
    ("cuda-version", changed(GOOD, cuda="N/A"), D, WARN, "does not say"),
    ("cuda-version", changed(GOOD, torch=TorchBuild("2.3.0+cu121", "12.1")), D, ERROR, "built for CUDA 12.1"),
    ("cuda-version", changed(GOOD, torch=TorchBuild("2.9.0+cu130", "13.0")), D, ERROR, "update the driver"),
    ("cuda-version", changed(GOOD, torch=TorchBuild("2.9.0+cu128", "12.8")), D, OK, "12.8"),
    ("pytorch-version", changed(GOOD, torch=TorchBuild("2.3.0+cu124", "12.4")), D, OK, "2.3.0"),
    ("pytorch-version", changed(GOOD, torch=TorchBuild("2.10.0+cu128", "12.8")), D, OK, "2.10.0"),
    ("pytorch-version", changed(GOOD, torch=TorchBuild("2.2.2", "12.4")), D, ERROR, "2.3 or newer"),
    ("pytorch-version", changed(GOOD, torch=None), D, ERROR, "not installed"),
    ("pytorch-version", changed(GOOD, torch=TorchBuild("2.6.0+cpu", "")), D, WARN, "without CUDA"),
    ("pytorch-version", NO_GPU, D, OK, "2.6.0+cpu"),
    ("native-copier", NO_GPU, D, OK, "built: "),
    ("native-copier", changed(NO_GPU, copier_problem="no compiler"), D, WARN, "C compiler"),
    ("native-copier", changed(GOOD, copier_problem="no compiler"), D, OK, "not built (no compiler)"),
    ("hbm-budget", GOOD, D, OK, "60.0 GiB of 80.0 GiB"),
    ("hbm-budget", GOOD, reference(hbm_reserve_mb=81920), ERROR, "leaves nothing"),
    ("hbm-budget", GOOD, reference(hbm_capacity_mb=61440), OK, "60.0 GiB"),
    ("hbm-budget", GOOD, reference(hbm_capacity_mb=61441), WARN, "61440 MiB"),
    ("hbm-budget", NO_GPU, reference(hbm_capacity_mb=100), OK, "100 MiB"),
    ("hbm-budget", NO_GPU, D, OK, "chooses its size"),
    ("device-processes", GOOD, D, OK, "idle"),
    ("device-processes", used(2000, "GPU-0aaa, 77, python, 1900"), D, WARN, "python (pid 77) 1.9 GiB"),
    ("device-processes", used(4, "GPU-0aaa, 77, python, [N/A]"), D, WARN, "an unknown amount"),
    ("device-processes", used(4, "GPU-other, 77, python, 1900"), D, OK, "idle"),
    ("device-processes", used(3000), D, WARN, "cannot be seen from here"),
    ("device-processes", used(61440, "GPU-0aaa, 77, python, 61440"), D, ERROR, "the start is refused"),
    ("device-processes", NO_GPU, D, SKIPPED, "no device"),
    ("device-numa-node", GOOD, D, OK, "one NUMA node"),
    ("device-numa-node", numa("32-63"), D, OK, "device 0 on node 1"),
    ("device-numa-node", numa("0-63"), D, OK, "numactl"),
    ("device-numa-node", numa("0-31"), D, WARN, "numactl"),
    ("device-numa-node", numa("32-63", mems="0"), D, WARN, "node 1"),
    ("device-numa-node", numa("0-31", device_node="-1"), D, OK, "does not say"),
    ("device-numa-node", NO_GPU, D, SKIPPED, "no device"),
    ("dram-share", GOOD, reference(dram_capacity_mb=209715), OK, "80%"),
    ("dram-share", GOOD, reference(dram_capacity_mb=209716), WARN, "to 209715"),
    ("dram-share", GOOD, reference(dram_capacity_mb=261632), WARN, "page cache"),
    ("dram-share", GOOD, reference(dram_capacity_mb=261633), ERROR, "the start will fail"),
    ("dram-share", GOOD, {}, OK, "64.0 GiB asked of 256.0 GiB (physical memory), 25%"),
    ("dram-available", GOOD, D, OK, "240.0 GiB available"),
    ("dram-available", changed(GOOD, files=meminfo(125)), D, WARN, "other processes"),
    ("dram-available", changed(GOOD, files={"proc/meminfo": "MemTotal: 9999 kB\n"}), D, SKIPPED, "does not say"),
    ("shm-size", GOOD, D, OK, "on the machine itself"),
    ("shm-size", changed(GOOD, space=SHM), D, WARN, "remount it larger"),
    ("shm-size", changed(GOOD, space=SHM, environ={"container": "podman"}), D, WARN, "--shm-size"),
    ("shm-size", changed(GOOD, space=SHM, files={"proc/1/cgroup": "0::/kubepods/x\n"}), D, WARN, "emptyDir"),
    ("shm-size", changed(GOOD, space={"/dev/shm": Space(GIB, 0)}), D, OK, "1.0 GiB"),
    ("memlock-limit", GOOD, D, OK, "unlimited"),
    ("memlock-limit", changed(GOOD, files=limits("8388608")), D, WARN, "ulimit -l unlimited"),
    ("memlock-limit", changed(GOOD, files=limits(str(128512 * MIB))), D, OK, "125.5 GiB"),
    ("memlock-limit", NO_GPU, D, SKIPPED, "no memory is page-locked"),
    ("nvme-device", GOOD, D, OK, "nvme0n1 (xfs)"),
    ("nvme-device", GOOD, reference(nvme_capacity_mb=0), SKIPPED, "no NVMe tier"),
    ("nvme-device", GOOD, reference(nvme_path="/home/x"), WARN, "a disk that turns"),
    ("nvme-device", nvme_on("0:40 / /nvme rw - ramfs none rw"), D, ERROR, "which is memory"),
    ("nvme-device", nvme_on("259:1 / /nvme ro - xfs /dev/nvme0n1p1 rw"), D, ERROR, "read-only"),
    ("nvme-device", nvme_on("259:1 / /nvme rw - xfs /dev/nvme0n1p1 ro"), D, ERROR, "read-only"),
    ("nvme-device", nvme_on("0:40 / /nvme rw - overlay overlay rw"), D, WARN, "container's own layer"),
    ("nvme-device", nvme_on("0:40 / /nvme rw - nfs4 host:/x rw"), D, WARN, "another machine's"),
    ("nvme-device", nvme_on("0:40 / /nvme rw - fuse.sshfs host:/x rw"), D, WARN, "another machine's"),
    ("nvme-device", nvme_on("0:40 / /nvme rw - zfs tank/kv rw"), D, WARN, "cannot be told"),
    ("nvme-device", nvme_on("0:40 /sub /nvme rw - btrfs /dev/nvme0n1p1 rw"), D, OK, "nvme0n1 (btrfs)"),
    ("nvme-device", changed(GOOD, mounts=()), D, WARN, "does not say"),
    ("nvme-direct-io", GOOD, D, OK, "O_DIRECT works"),
    ("nvme-direct-io", GOOD, reference(nvme_capacity_mb=0), SKIPPED, "no NVMe tier"),
    (
        "nvme-direct-io",
        changed(GOOD, direct_io=DirectIOTrial(DirectIO.REFUSED, "Invalid argument")),
        D,
        WARN,
        "Invalid argument",
    ),
    (
        "nvme-direct-io",
        changed(GOOD, direct_io=DirectIOTrial(DirectIO.NOT_WRITABLE, "Permission denied")),
        D,
        ERROR,
        "Permission denied",
    ),
    ("nvme-space", changed(GOOD, space={"/nvme": Space(GIB, 2 * 512000 * MIB)}), D, OK, "1000.0 GiB free"),
    ("nvme-space", changed(GOOD, space={"/nvme": Space(GIB, 2 * 512000 * MIB - 1)}), D, WARN, "less than twice"),
    ("nvme-space", changed(GOOD, space={"/nvme": Space(GIB, 512000 * MIB)}), D, WARN, "less than twice"),
    ("nvme-space", changed(GOOD, space={"/nvme": Space(GIB, 512000 * MIB - 1)}), D, ERROR, "the start will fail"),
    ("nvme-space", GOOD, reference(nvme_capacity_mb=0), SKIPPED, "no NVMe tier"),
    ("tier-sizes", GOOD, reference(dram_capacity_mb=0, nvme_capacity_mb=0), WARN, "no tier below HBM"),
    ("tier-sizes", GOOD, D, OK, "HBM for KV 60.0 GiB, DRAM 125.0 GiB, NVMe 500.0 GiB: 685.0 GiB together"),
    ("tier-sizes", GOOD, reference(dram_capacity_mb=20480), OK, "DRAM is smaller than HBM, which is supported"),
    ("tier-sizes", GOOD, reference(dram_capacity_mb=20480, nvme_capacity_mb=0), OK, "new requests wait"),
    ("tier-sizes", NO_GPU, D, OK, "not known here"),
    ("staging-size", GOOD, D, OK, "512 MiB"),
    ("staging-size", GOOD, reference(staging_buffer_size_mb=1023), OK, "1023"),
    ("staging-size", GOOD, reference(staging_buffer_size_mb=1024), WARN, "raises the peak of memory"),
    ("prefetch-window", GOOD, window(7), OK, "7 blocks"),
    ("prefetch-window", GOOD, window(8), WARN, "write 4"),
    ("cold-threshold", GOOD, policy(cold_threshold=0.94), OK, "0.94"),
    ("cold-threshold", GOOD, policy(cold_threshold=0.99), WARN, "adaptive guard"),
    ("cold-threshold", GOOD, policy(cold_threshold=0.99, adaptive=False), WARN, "policy.adaptive is off"),
    ("cold-threshold", GOOD, policy(cold_threshold=0.99, eviction="lru"), OK, "knows no threshold"),
    ("cold-threshold", GOOD, policy(cold_threshold=0.05), WARN, "almost no block"),
    ("allocator-segments", GOOD, D, OK, "expandable_segments:True"),
    ("allocator-segments", env(PYTORCH_CUDA_ALLOC_CONF="expandable_segments:True"), D, OK, "has expandable_segments"),
    ("allocator-segments", env(PYTORCH_ALLOC_CONF="expandable_segments:False"), D, WARN, "PYTORCH_ALLOC_CONF has"),
    ("allocator-segments", env(PYTORCH_CUDA_ALLOC_CONF="backend:cudaMallocAsync"), D, WARN, "cudaMallocAsync"),
    ("allocator-segments", NO_GPU, D, SKIPPED, "no device"),
    ("allocator-caching", GOOD, D, OK, "is on"),
    ("allocator-caching", env(PYTORCH_NO_CUDA_MEMORY_CACHING="1"), D, WARN, "costs much speed"),
    ("first-generation-variables", env(DFLASH2_API_KEY="x"), D, OK, "no DFLASH_*"),
    ("first-generation-variables", env(DFLASH_NVME_PATH="/x"), D, WARN, "memory.nvme_path"),
    ("first-generation-variables", env(DFLASH_DRAFT="x"), D, WARN, "speculative-decoding drafter"),
    ("first-generation-shared-memory", GOOD, D, OK, "not there"),
    ("first-generation-shared-memory", changed(GOOD, files={"dev/shm/dflash/0": ""}), D, WARN, "rm -r"),
]


def check(name: str, machine: FakeMachine, document: dict[str, object], root: Path, **case: int) -> Finding:
    return CHECKS[name](machine.case(root, document, **case))


@pytest.mark.parametrize(("name", "machine", "document", "status", "words"), ROWS)
def test_check(
    name: str, machine: FakeMachine, document: dict[str, object], status: Status, words: str, tmp_path: Path
) -> None:
    finding = check(name, machine, document, tmp_path)
    assert finding.status is status
    assert words in f"{finding.found} -> {finding.advice}"
    assert bool(finding.advice) or status in (OK, SKIPPED)


def test_every_check_is_tried_both_ways() -> None:
    tried: dict[str, set[bool]] = {name: set() for name in CHECKS}
    for name, _, _, status, _ in ROWS:
        if status is not SKIPPED:
            tried[name].add(status is OK)
    assert [name for name, ways in tried.items() if len(ways) < 2] == []


def test_tensor_parallel_ranks_count_together(tmp_path: Path) -> None:
    sizes = check("tier-sizes", GOOD, REFERENCE, tmp_path / "a", ranks=8)
    assert "HBM for KV 480.0 GiB, DRAM 125.0 GiB" in sizes.found
    assert "DRAM is smaller than HBM" in sizes.found
    full = reference(dram_capacity_mb=260000)
    assert check("dram-share", GOOD, full, tmp_path / "b").status is WARN
    assert check("dram-share", GOOD, full, tmp_path / "c", ranks=8).status is ERROR


@pytest.mark.parametrize(
    ("block_mib", "size_mb", "status"),
    [(1, 128, OK), (1, 512, OK), (1, 513, WARN), (4, 1023, OK), (16, 512, OK), (16, 2000, OK), (600, 512, ERROR)],
)
def test_staging_against_the_models_blocks(block_mib: int, size_mb: int, status: Status, tmp_path: Path) -> None:
    document = reference(staging_buffer_size_mb=size_mb)
    finding = check("staging-size", GOOD, document, tmp_path, block_bytes=block_mib * MIB)
    assert finding.status is status


def test_a_process_with_the_capability_may_lock_all(tmp_path: Path) -> None:
    files = limits("65536") | {"proc/self/status": "CapEff:\t0000000000004000\n"}
    assert check("memlock-limit", changed(GOOD, files=files), REFERENCE, tmp_path).status is OK


def test_no_shm_at_all(tmp_path: Path) -> None:
    machine = GOOD.build(tmp_path)
    (tmp_path / "dev/shm/.keep").unlink()
    (tmp_path / "dev/shm").rmdir()
    case = open_case(machine, ConfigReading(config_of(REFERENCE)))
    assert CHECKS["shm-size"](case).status is WARN


@pytest.mark.parametrize(
    ("below", "status", "words"),
    [(["nvme0n1p1"], OK, "nvme0n1"), (["nvme0n1p1", "sda2"], WARN, "nvme0n1, sda"), (["sda"], WARN, "sda")],
)
def test_a_mapping_is_what_lies_below_it(below: list[str], status: Status, words: str, tmp_path: Path) -> None:
    case = nvme_on("253:0 / /nvme rw - ext4 /dev/mapper/vg-kv rw").case(tmp_path)
    mapped_disk(tmp_path, "dm-0", "253:0", below)
    finding = CHECKS["nvme-device"](case)
    assert finding.status is status
    assert words in finding.found


def test_nvme_over_a_network(tmp_path: Path) -> None:
    case = GOOD.case(tmp_path)
    for file in tmp_path.rglob("transport"):
        file.write_text("tcp\n", encoding="ascii")
    finding = CHECKS["nvme-device"](case)
    assert finding.status is WARN
    assert "NVMe over tcp" in finding.found


def test_of_several_nvme_paths_the_worst_is_told(tmp_path: Path) -> None:
    several = reference(nvme_path=None, nvme_paths=["/nvme/a", "/home/x"])
    finding = CHECKS["nvme-device"](GOOD.case(tmp_path, several))
    assert finding.status is WARN and finding.found.startswith("/home/x is on")
    assert CHECKS["paths-absolute"](GOOD.case(tmp_path / "again", several)).found == "NVMe files go to /home/x, /nvme/a"


def test_several_nvme_paths_on_one_disk_gain_nothing(tmp_path: Path) -> None:
    finding = CHECKS["nvme-device"](GOOD.case(tmp_path, reference(nvme_path=None, nvme_paths=["/nvme/a", "/nvme/b"])))
    assert finding.status is WARN and "several of memory.nvme_paths are on /dev/nvme0n1p1" in finding.found


def test_a_virtual_disk_is_not_said_to_turn(tmp_path: Path) -> None:
    case = nvme_on("254:0 / /nvme rw - ext4 /dev/vda rw").case(tmp_path)
    device = tmp_path / "sys/devices/virtio1/block/vda"
    (device / "queue").mkdir(parents=True)
    (device / "queue/rotational").write_text("1\n", encoding="ascii")
    link(tmp_path, "vda", "254:0", device)
    finding = CHECKS["nvme-device"](case)
    assert finding.status is WARN
    assert "--probe" in finding.advice


def test_a_link_leads_to_the_real_disk(tmp_path: Path) -> None:
    case = GOOD.case(tmp_path, reference(nvme_path="/fast/kv"))
    (tmp_path / "fast").symlink_to(tmp_path / "nvme")
    assert "nvme0n1" in CHECKS["nvme-device"](case).found


def test_a_later_mount_hides_an_earlier_one(tmp_path: Path) -> None:
    machine = changed(GOOD, mounts=(ROOT_MOUNT, NVME_MOUNT, "31 30 0:41 / /nvme rw - tmpfs tmpfs rw"))
    assert check("nvme-device", machine, REFERENCE, tmp_path).status is ERROR


def test_a_mount_point_with_a_blank(tmp_path: Path) -> None:
    case = nvme_on(r"259:1 / /fast\040disk rw - xfs /dev/nvme0n1p1 rw").case(
        tmp_path, reference(nvme_path="/fast disk/kv")
    )
    (tmp_path / "fast disk").mkdir()
    assert CHECKS["nvme-device"](case).status is OK
