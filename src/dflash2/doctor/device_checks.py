"""Memory, neighbours and placement of the devices (R-2.5, R-6.4, R-6.8), and PyTorch's allocator (R-6.7)."""

from __future__ import annotations

import os

from dflash2.doctor.case import Case
from dflash2.doctor.devices import Device
from dflash2.doctor.findings import Finding, error, gib, ok, skipped, warn
from dflash2.types import MIB

NO_DEVICE = "no device is visible here"
IDLE_USE_BYTES = 1024 * MIB
"""What a driver and a display may hold on a device that nobody computes on."""


def check_hbm_budget(case: Case) -> Finding:
    """The reserve leaves room for KV on every device, and ``hbm_capacity_mb`` fits into it."""
    memory = case.config.memory
    if not case.devices.devices:
        if memory.hbm_capacity_mb is None:
            return ok("the fast pool is on the CPU; memory.hbm_capacity_mb is not set, so the engine chooses its size")
        return ok(f"the fast pool is on the CPU, {memory.hbm_capacity_mb} MiB")
    smallest = min(case.devices.devices, key=lambda device: device.total_bytes)
    room = case.kv_bytes(smallest)
    if room <= 0:
        return error(
            f"memory.hbm_reserve_mb {memory.hbm_reserve_mb} leaves nothing of {smallest.total_bytes >> 20} MiB "
            f"({smallest.name})",
            "lower it to what weights and activations need on one device; `dflash2 plan` computes it",
        )
    if memory.hbm_capacity_mb is not None and memory.hbm_capacity_mb * MIB > room:
        return warn(
            f"memory.hbm_capacity_mb {memory.hbm_capacity_mb} is more than the {room >> 20} MiB beside the reserve",
            f"the pool will be {room >> 20} MiB; write that, or leave the key out",
        )
    return ok(f"{gib(room)} of {gib(smallest.total_bytes)} for KV on each device")


def check_device_processes(case: Case) -> Finding:
    """Nobody else holds device memory, since all HBM for KV is taken at start."""
    devices = case.devices.devices
    if not devices:
        return skipped(NO_DEVICE)
    taken = [device for device in devices if _is_taken(case, device)]
    found = "; ".join(_use(case, device) for device in taken or devices)
    if not taken:
        return ok(found)
    remedy = "end these processes, or choose another device"
    if any(device.used_bytes > device.total_bytes - _asked(case, device) for device in taken):
        return error(f"{found}: more than memory.hbm_reserve_mb leaves beside KV, so the start is refused", remedy)
    return warn(f"{found}; it comes out of what memory.hbm_reserve_mb leaves to weights", remedy)


def _asked(case: Case, device: Device) -> int:
    """Bytes for KV."""
    room, cap = case.kv_bytes(device), case.config.memory.hbm_capacity_mb
    return room if cap is None else min(room, cap * MIB)


def _is_taken(case: Case, device: Device) -> bool:
    known = any(process.uuid == device.uuid for process in case.devices.processes)
    return known or device.used_bytes > IDLE_USE_BYTES


def _use(case: Case, device: Device) -> str:
    mine = [process for process in case.devices.processes if process.uuid == device.uuid]
    named = ", ".join(f"{process.name} (pid {process.pid}) {_amount(process.used_bytes)}" for process in mine)
    unseen = "held by processes that cannot be seen from here" if device.used_bytes > IDLE_USE_BYTES else "idle"
    return f"device {device.index}: {gib(device.used_bytes)} of {gib(device.total_bytes)} in use, {named or unseen}"


def _amount(num_bytes: int | None) -> str:
    return "an unknown amount" if num_bytes is None else gib(num_bytes)


def check_device_numa(case: Case) -> Finding:
    """This process runs, and takes memory, near its devices."""
    if not case.devices.devices:
        return skipped(NO_DEVICE)
    if not case.machine.exists("/sys/devices/system/node/node1"):
        return ok("one NUMA node")
    nodes = {device.index: _numa_node(case, device) for device in case.devices.devices}
    known = {node for node in nodes.values() if node is not None}
    if not known:
        return ok("the machine does not say which NUMA node its devices are on")
    cpus = _allowed(case, "Cpus_allowed_list")
    memory_nodes = _allowed(case, "Mems_allowed_list")
    text = ", ".join(f"device {index} on node {node}" for index, node in nodes.items() if node is not None)
    far = [node for node in sorted(known) if not cpus & _node_cpus(case, node) or node not in memory_nodes]
    bind = "bind each rank to its device's node: numactl --cpunodebind=N --membind=N"
    if far:
        return warn(f"{text}; this process may not run or take memory on node {far[0]}", bind)
    near = set().union(*(_node_cpus(case, node) for node in known))
    return ok(text, "" if cpus <= near else f"for the fastest copies {bind}")


def check_allocator_segments(case: Case) -> Finding:
    """PyTorch's caching allocator may grow its segments instead of leaving holes."""
    if not case.devices.devices:
        return skipped(NO_DEVICE)
    name, settings = _allocator_settings(case)
    remedy = "set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"
    if settings.get("backend", "native") != "native":
        return warn(
            f"{name} chooses the allocator {settings['backend']}, which knows no expandable segments",
            f"{remedy} and leave the backend at native",
        )
    value = settings.get("expandable_segments", "")
    if value.lower() == "true":
        return ok(f"{name} has expandable_segments:True")
    if value:
        return warn(
            f"{name} has expandable_segments:{value}", f"{remedy}: beside a pool taken at start holes cost more"
        )
    return ok(
        "expandable segments are not set; the KV pool is taken before the weights, so it is not split itself",
        f"should the engine run out of memory while much is reserved but not allocated: {remedy}",
    )


def check_allocator_caching(case: Case) -> Finding:
    """PyTorch's caching allocator is on."""
    value = case.machine.environ.get("PYTORCH_NO_CUDA_MEMORY_CACHING")
    if value is None:
        return ok("PyTorch's caching allocator is on")
    return warn(
        f"PYTORCH_NO_CUDA_MEMORY_CACHING={value} turns PyTorch's caching allocator off, which costs much speed",
        "unset it; against fragmentation set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True",
    )


def _allocator_settings(case: Case) -> tuple[str, dict[str, str]]:
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        text = case.machine.environ.get(name)
        if text:
            pairs = (part.partition(":") for part in text.split(","))
            return name, {key.strip(): value.strip() for key, _, value in pairs}
    return "PYTORCH_CUDA_ALLOC_CONF", {}


def _numa_node(case: Case, device: Device) -> int | None:
    text = case.machine.read(f"/sys/bus/pci/devices/{device.pci_address}/numa_node") or ""
    return int(text) if text.isdigit() else None  # the kernel writes a negative number where it does not know


def _node_cpus(case: Case, node: int) -> set[int]:
    return number_list(case.machine.read(f"/sys/devices/system/node/node{node}/cpulist") or "")


def _allowed(case: Case, name: str) -> set[int]:
    for line in (case.machine.read("/proc/self/status") or "").splitlines():
        if line.startswith(f"{name}:"):
            return number_list(line.partition(":")[2])
    return set(range(os.cpu_count() or 1))


def number_list(text: str) -> set[int]:
    """``0-3,8`` as a set of numbers, as the kernel writes CPUs and nodes."""
    numbers: set[int] = set()
    for part in text.strip().split(","):
        first, _, last = part.strip().partition("-")
        if first.isdigit():
            numbers.update(range(int(first), int(last or first) + 1))
    return numbers
