"""Six machines, each with exactly the statuses that it should have."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.doctor.fake_machine import GIB, GOOD, MIB, NO_GPU, NVME_PATH, ROOT_MOUNT, FakeMachine, changed, reference

from dflash2.doctor.checks import CHECKS, exit_code, run_checks
from dflash2.doctor.findings import Status
from dflash2.doctor.machine import Space

OK, WARN, ERROR, SKIPPED = Status.OK, Status.WARN, Status.ERROR, Status.SKIPPED

CONTAINER = changed(
    NO_GPU,
    files={
        ".dockerenv": "",
        "proc/self/cgroup": "0::/\n",
        "sys/fs/cgroup/memory.max": f"{4 * GIB}\n",
        "data/.keep": "",
    },
    mounts=(
        "22 1 0:60 / / rw,relatime - overlay overlay rw,lowerdir=/l,upperdir=/u,workdir=/w",
        "23 22 259:1 /volumes/data /data rw - xfs /dev/nvme0n1p1 rw",
    ),
    space={"/dev/shm": Space(64 * MIB, 64 * MIB), "/data": Space(1000 * GIB, 900 * GIB)},
)
TMPFS = changed(GOOD, mounts=(ROOT_MOUNT, "30 22 0:40 / /nvme rw - tmpfs tmpfs rw,size=3145728k"))
FULL = changed(GOOD, space={"/nvme": Space(3000 * GIB, 10 * GIB)})
OLD_DRIVER = changed(GOOD, driver="525.147.05", cuda="12.0")
LEFTOVERS = changed(
    GOOD,
    files={"dev/shm/dflash": "x"},
    environ={"DFLASH_OFFLOAD_ENABLE": "1", "DFLASH_DRAM_LIMIT": "64GB"},
)

ALL_OK = dict.fromkeys(CHECKS, OK)
CONTAINER_STATUSES = {
    "driver-version": SKIPPED,
    "devices-readable": SKIPPED,
    "cuda-version": SKIPPED,
    "device-processes": SKIPPED,
    "device-numa-node": SKIPPED,
    "memlock-limit": SKIPPED,
    "allocator-segments": SKIPPED,
    "dram-share": ERROR,
    "shm-size": WARN,
}

MACHINES: dict[str, tuple[FakeMachine, dict[str, object], dict[str, Status], int]] = {
    "good": (GOOD, reference(), {}, 0),
    "old driver": (OLD_DRIVER, reference(), {"driver-version": ERROR, "cuda-version": ERROR}, 2),
    "container": (CONTAINER, reference(nvme_path="/data/dflash2", nvme_capacity_mb=100_000), CONTAINER_STATUSES, 2),
    "tmpfs": (TMPFS, reference(), {"nvme-device": ERROR}, 2),
    "full disk": (FULL, reference(), {"nvme-space": ERROR}, 2),
    "first generation": (
        LEFTOVERS,
        reference(),
        {"first-generation-variables": WARN, "first-generation-shared-memory": WARN},
        1,
    ),
}


@pytest.mark.parametrize("name", MACHINES)
def test_statuses(name: str, tmp_path: Path) -> None:
    machine, document, differing, code = MACHINES[name]
    results = run_checks(machine.case(tmp_path, document))
    assert {result.id: result.finding.status for result in results} == ALL_OK | differing
    assert exit_code(results) == code


@pytest.mark.parametrize("name", MACHINES)
def test_whoever_is_not_well_is_told_what_to_do(name: str, tmp_path: Path) -> None:
    machine, document, *_ = MACHINES[name]
    for result in run_checks(machine.case(tmp_path, document)):
        assert result.finding.found, result.id
        if result.finding.status in (WARN, ERROR):
            assert result.finding.advice, result.id


def test_the_container_is_measured_by_its_own_limit(tmp_path: Path) -> None:
    results = {r.id: r.finding for r in run_checks(CONTAINER.case(tmp_path, reference(dram_capacity_mb=3000)))}
    assert results["dram-share"].status is OK
    assert "3 GiB" not in results["dram-share"].advice
    assert "of 4.0 GiB (cgroup memory.max), 73%" in results["dram-share"].found
    assert "64 MiB (in a container)" in results["shm-size"].found


def test_an_invalid_file_hides_nothing_of_the_machine(tmp_path: Path) -> None:
    from dflash2.doctor.case import open_case, read_config

    file = tmp_path / "c.json"
    file.write_text('{"memory": {"nvme_path": "nvme"}}', encoding="utf-8")
    case = open_case(OLD_DRIVER.build(tmp_path / "root"), read_config(file))
    results = {result.id: result.finding for result in run_checks(case)}
    assert results["config-file"].status is ERROR
    assert f'probably "{tmp_path}/nvme"' in results["config-file"].found
    assert results["driver-version"].status is ERROR
    assert results["nvme-space"].status is SKIPPED
    assert "not valid" in results["nvme-space"].found


def test_the_old_variables_are_named_with_their_keys(tmp_path: Path) -> None:
    found = {r.id: r.finding for r in run_checks(LEFTOVERS.case(tmp_path))}["first-generation-variables"].found
    assert "DFLASH_OFFLOAD_ENABLE no longer acts; enable in" in found
    assert "DFLASH_DRAM_LIMIT no longer acts; memory.dram_capacity_mb in" in found


def test_own_files_count_as_free_space(tmp_path: Path) -> None:
    machine = changed(GOOD, space={"/nvme": Space(GIB, 3 * MIB)})
    document = reference(nvme_capacity_mb=4)
    before = {r.id: r.finding for r in run_checks(machine.case(tmp_path / "a", document))}
    assert before["nvme-space"].status is ERROR
    case = machine.case(tmp_path / "b", document)
    folder = case.machine.at(NVME_PATH) / "rank0"
    folder.mkdir(parents=True)
    (folder / "data").write_bytes(b"x" * (4 * MIB))
    after = {r.id: r.finding for r in run_checks(case)}
    assert after["nvme-space"].status is WARN
    (folder.parent / "rank1").mkdir()
    (folder.parent / "rank1" / "data").write_bytes(b"x" * (4 * MIB))
    assert {r.id: r.finding for r in run_checks(case)}["nvme-space"].status is OK
