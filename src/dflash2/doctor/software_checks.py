"""Driver, CUDA and PyTorch (R-6.1)."""

from __future__ import annotations

import re

from dflash2.doctor.case import Case
from dflash2.doctor.findings import Finding, error, ok, skipped, warn

MIN_DRIVER = (535, 0)
MIN_CUDA = (12, 4)
MIN_TORCH = (2, 3)

NO_DRIVER = "no NVIDIA driver here; on a CPU none is needed"


def check_driver(case: Case) -> Finding:
    """Driver at least 535."""
    version = case.devices.driver
    if not version:
        return skipped(NO_DRIVER)
    if _numbers(version) < MIN_DRIVER:
        return error(f"driver {version}", "install driver 535 or newer; older ones do not run CUDA 12.4")
    return ok(f"driver {version}")


def check_devices_readable(case: Case) -> Finding:
    """The driver answers, and shows this process a device."""
    reading = case.devices
    if reading.problem:
        return error(
            reading.problem,
            "load the driver that fits its libraries (a reboot after an update helps); in a container pass the "
            "devices in, with `--gpus all` and the NVIDIA container toolkit",
        )
    if not reading.driver:
        return skipped(NO_DRIVER)
    if not reading.devices:
        return error(
            "the driver runs, but no device is visible to this process",
            "look at CUDA_VISIBLE_DEVICES, and at what the container or the scheduler passes in",
        )
    return ok("; ".join(f"{d.index}: {d.name}, {d.total_bytes >> 20} MiB" for d in reading.devices))


def check_cuda(case: Case) -> Finding:
    """CUDA at least 12.4, both what the driver supports and what PyTorch was built for."""
    reading = case.devices
    if not reading.driver:
        return skipped(NO_DRIVER)
    if not reading.cuda:
        return warn("nvidia-smi does not say which CUDA version the driver supports", "update the driver")
    if _numbers(reading.cuda) < MIN_CUDA:
        return error(f"the driver supports CUDA {reading.cuda}", "install a driver that supports CUDA 12.4 or newer")
    build = case.machine.torch_build()
    built = build.cuda if build is not None else ""
    if not built:
        return ok(f"the driver supports CUDA {reading.cuda}")
    if _numbers(built) < MIN_CUDA:
        return error(f"PyTorch is built for CUDA {built}", "install a PyTorch build for CUDA 12.4 or newer")
    if _numbers(built)[0] > _numbers(reading.cuda)[0]:
        return error(
            f"PyTorch is built for CUDA {built}, the driver supports {reading.cuda}",
            "update the driver, or install a PyTorch build for the driver's major version of CUDA",
        )
    return ok(f"the driver supports CUDA {reading.cuda}, PyTorch is built for {built}")


def check_pytorch(case: Case) -> Finding:
    """PyTorch at least 2.3, with CUDA where there is a device."""
    build = case.machine.torch_build()
    if build is None:
        return error("PyTorch is not installed", "install PyTorch 2.3 or newer")
    if _numbers(build.version) < MIN_TORCH:
        return error(f"PyTorch {build.version}", "install PyTorch 2.3 or newer")
    if case.devices.driver and not build.cuda:
        return warn(
            f"PyTorch {build.version} is built without CUDA, so the device is not used",
            "install a PyTorch build for CUDA 12.4 or newer",
        )
    return ok(f"PyTorch {build.version}")


def check_native_copier(case: Case) -> Finding:
    """The library that copies in host memory and moves NVMe blocks was built at installation, and can be used."""
    problem = case.machine.native_copier_problem()
    if not problem:
        return ok("built: copies in host memory go past the cache, NVMe blocks move without the interpreter")
    if case.devices.driver:
        return ok(f"not built ({problem}); the device's driver copies, but NVMe blocks move one by one")
    return warn(
        f"copies in host memory and NVMe blocks go through Python, at about half the speed: {problem}",
        "install a C compiler (gcc or clang), then the package again",
    )


def _numbers(version: str) -> tuple[int, int]:
    found = [int(number) for number in re.findall(r"\d+", version)[:2]]
    return (found[0], found[1] if len(found) > 1 else 0)
