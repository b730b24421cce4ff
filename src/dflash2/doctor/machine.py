"""The one way in which the doctor touches a machine, so that a test can hand it another one."""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import mmap
import os
import re
import subprocess
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path

from dflash2.pools.native_blocks import NativeBlocks
from dflash2.pools.native_rows import NativeRows
from dflash2.types import PAGE_BYTES

COMMAND_TIMEOUT_S = 20.0
"""nvidia-smi hangs when a device has fallen off the bus."""


@dataclass(frozen=True, slots=True)
class CommandOutput:
    """What a program said.

    Attributes:
        ok: it ended with 0.
        text: its output; if it failed, both streams or why it could not end.
    """

    ok: bool
    text: str


@dataclass(frozen=True, slots=True)
class Space:
    """Size of a file system and what this user may still write, in bytes."""

    total_bytes: int
    free_bytes: int


class DirectIO(Enum):
    """How a folder takes files opened with O_DIRECT."""

    WORKS = "works"
    REFUSED = "refused"
    """Files can be written, but not with O_DIRECT."""
    NOT_WRITABLE = "not writable"


@dataclass(frozen=True, slots=True)
class DirectIOTrial:
    """Outcome of a trial; ``reason`` is the system's wording where it did not work."""

    outcome: DirectIO
    reason: str = ""


@dataclass(frozen=True, slots=True)
class TorchBuild:
    """The installed PyTorch.

    Attributes:
        version: such as ``2.6.0+cu124``.
        cuda: CUDA version it was built for; empty for a build without CUDA.
    """

    version: str
    cuda: str


def run_command(argv: Sequence[str]) -> CommandOutput | None:
    """Run a program that only reads; None if it is not installed."""
    try:
        result = subprocess.run(argv, capture_output=True, text=True, timeout=COMMAND_TIMEOUT_S, check=False)
    except FileNotFoundError:
        return None
    except OSError as error:
        return CommandOutput(False, f"{argv[0]}: {error.strerror or error}")
    except subprocess.TimeoutExpired:
        return CommandOutput(False, f"{argv[0]} gave no answer for {COMMAND_TIMEOUT_S:.0f} s")
    if result.returncode:
        return CommandOutput(False, (result.stdout + result.stderr).strip())
    return CommandOutput(True, result.stdout)


def file_system_space(path: Path) -> Space:
    """Of the file system that holds ``path``. Raises OSError."""
    stats = os.statvfs(path)
    return Space(stats.f_blocks * stats.f_frsize, stats.f_bavail * stats.f_frsize)


def try_direct_io(folder: Path) -> DirectIOTrial:
    """Write and read one page through O_DIRECT in a nameless or at once deleted file of an existing folder."""
    try:
        fd, name = tempfile.mkstemp(prefix=".dflash2-doctor-", dir=folder)
    except OSError as error:
        return DirectIOTrial(DirectIO.NOT_WRITABLE, error.strerror or str(error))
    direct_fd: int | None = None
    try:
        os.pwrite(fd, bytes(PAGE_BYTES), 0)
        direct_fd = os.open(name, os.O_RDWR | os.O_DIRECT | os.O_CLOEXEC)
        page = mmap.mmap(-1, PAGE_BYTES)
        os.pwritev(direct_fd, [page], 0)
        os.preadv(direct_fd, [page], 0)
    except OSError as error:
        return DirectIOTrial(DirectIO.REFUSED, error.strerror or str(error))
    finally:
        with contextlib.suppress(FileNotFoundError):
            Path(name).unlink()
        os.close(fd)
        if direct_fd is not None:
            os.close(direct_fd)
    return DirectIOTrial(DirectIO.WORKS)


def installed_torch() -> TorchBuild | None:
    """Read the installed PyTorch's version without importing it; None if there is none."""
    try:
        version = importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        return None
    spec = importlib.util.find_spec("torch")
    cuda: str | None = None
    for folder in (spec.submodule_search_locations or ()) if spec is not None else ():
        file = Path(folder) / "version.py"
        if file.is_file():
            match = re.search(r"^cuda\b[^=]*=\s*['\"]([\d.]+)['\"]", file.read_text(encoding="utf-8"), re.MULTILINE)
            cuda = match[1] if match else ""
    return TorchBuild(version, cuda or "")


def native_copier_problem() -> str:
    """Why copies in host memory and blocks on NVMe have to go through Python; empty if they do not."""
    try:
        NativeRows()
        NativeBlocks()
    except OSError as error:
        return str(error)
    return ""


@dataclass(frozen=True, slots=True)
class Machine:
    """What the checks see of a machine. Paths are the machine's own; ``root`` says where its tree really is.

    Attributes:
        root: holds ``proc``, ``sys``, ``dev`` and the rest.
        environ: environment variables.
        run: runs a program.
        space: of the file system that holds a path.
        try_direct_io: tries an existing folder.
        torch_build: the installed PyTorch.
        native_copier_problem: see the function of that name.
    """

    root: Path = Path("/")
    environ: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))
    run: Callable[[Sequence[str]], CommandOutput | None] = run_command
    space: Callable[[Path], Space] = file_system_space
    try_direct_io: Callable[[Path], DirectIOTrial] = try_direct_io
    torch_build: Callable[[], TorchBuild | None] = installed_torch
    native_copier_problem: Callable[[], str] = native_copier_problem

    def at(self, path: str | Path) -> Path:
        """Where an absolute path of the machine really is."""
        return self.root / str(path).lstrip("/")

    def exists(self, path: str | Path) -> bool:
        """Whether something is there that this user may look at."""
        try:
            self.at(path).stat()
        except OSError:
            return False
        return True

    def read(self, path: str | Path) -> str | None:
        """Text of a small file, stripped; None if it is not there or may not be read."""
        try:
            return self.at(path).read_text(encoding="utf-8", errors="replace").strip()
        except OSError:
            return None

    def nearest_existing(self, path: Path) -> Path:
        """The path or the nearest folder above it that exists, links resolved; a machine's path again."""
        for candidate in (path, *path.parents):
            if self.exists(candidate):
                real = self.at(candidate).resolve()
                root = self.root.resolve()
                return Path("/") / real.relative_to(root) if real.is_relative_to(root) else candidate
        return Path("/")
