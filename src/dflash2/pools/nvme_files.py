"""The files of one NVMe pool: owned, locked, allocated, opened. Everything that can be wrong is said at start."""

from __future__ import annotations

import fcntl
import logging
import mmap
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeAlias

from dflash2.errors import StorageError
from dflash2.pools.nvme_format import HEADER_BYTES, FileRole, Superblock, parse_superblock
from dflash2.pools.nvme_recovery import StaleBlocks, count_stale
from dflash2.types import PAGE_BYTES

log = logging.getLogger(__name__)

IoMode: TypeAlias = Literal["direct", "buffered"]
_FILE_MODE = 0o600
_DIR_MODE = 0o700


@dataclass(frozen=True, slots=True)
class Geometry:
    """What a pool asks of its files; the fields are those of ``Superblock``."""

    num_slots: int
    stride_bytes: int
    payload_bytes: int
    fingerprint: bytes

    def slots_on(self, part: int, num_parts: int) -> int:
        """Slots of the stripe ``part``."""
        return (self.num_slots - part + num_parts - 1) // num_parts

    @property
    def index_bytes(self) -> int:
        """Size of the index file."""
        return PAGE_BYTES + -(-self.num_slots * HEADER_BYTES // PAGE_BYTES) * PAGE_BYTES

    def data_bytes(self, part: int, num_parts: int) -> int:
        """Size of the data file of one stripe."""
        return PAGE_BYTES + self.slots_on(part, num_parts) * self.stride_bytes


class PoolFiles:
    """Opens (or creates) the files of a pool and keeps them locked until ``close``.

    Args:
        directories: absolute, existing directories; slots are striped over them.
        name: sub-directory of each that this rank owns.
        geometry: what the files must hold.
        direct_io: try O_DIRECT.
        free_space_floor_bytes: space that must stay free on each file system after the files are allocated.

    Attributes:
        index_fd: buffered; superblock and headers.
        data_fds: one per directory.
        io_mode: how the data files are really open.
        previous: the superblock found, None for new files.
        reusable: True if what the files held before may be adopted.
        stale: what they held for another model or layout; wiped.

    Raises:
        StorageError: directory, owner, lock, format or space; the message names the path and what to do.
    """

    def __init__(
        self,
        directories: Sequence[Path],
        name: str,
        geometry: Geometry,
        direct_io: bool = True,
        free_space_floor_bytes: int = 0,
    ) -> None:
        if not directories or not name or "/" in name or name.startswith("."):
            raise StorageError(f"an NVMe pool needs a directory and a plain name, got {list(directories)} and {name!r}")
        self.io_mode: IoMode = "direct" if direct_io else "buffered"
        self._fds: list[int] = []
        try:
            self.folders = [_own_folder(directory, name) for directory in directories]
            for folder in self.folders:
                self._fds.append(_lock(folder))
            self.index_fd = self._open(self.folders[0] / "index", 0)
            self.data_fds = [self._open(folder / "data", 0) for folder in self.folders]
            self.previous, self.reusable = self._read_superblocks(geometry)
            self._remove_other_indexes()
            self.stale = StaleBlocks(0, 0)
            if self.previous is not None and not self.reusable:
                self.stale = count_stale(self.index_fd, self.previous)
            self._allocate(geometry, free_space_floor_bytes)
            self._write_superblocks(geometry)
            if direct_io:
                self.data_fds = [
                    self._reopen_direct(folder, fd) for folder, fd in zip(self.folders, self.data_fds, strict=True)
                ]
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Close every file, which ends the lock. Idempotent."""
        while self._fds:
            os.close(self._fds.pop())

    def _open(self, path: Path, extra_flags: int) -> int:
        try:
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC | extra_flags, _FILE_MODE)
        except OSError as error:
            raise StorageError(f"cannot open {path}: {error.strerror}") from error
        self._fds.append(fd)
        _check_owner(os.fstat(fd), path)
        os.fchmod(fd, _FILE_MODE)
        return fd

    def _read_superblocks(self, geometry: Geometry) -> tuple[Superblock | None, bool]:
        pages = [(self.folders[0] / "index", self.index_fd)]
        pages += [(folder / "data", fd) for folder, fd in zip(self.folders, self.data_fds, strict=True)]
        index, *data = [parse_superblock(os.pread(fd, PAGE_BYTES, 0), str(path)) for path, fd in pages]
        if index is None or None in data:
            return index, False
        same_pool = all(
            block is not None and (block.pool_id, block.part, block.role) == (index.pool_id, part, FileRole.DATA)
            for part, block in enumerate(data)
        )
        same_layout = (index.num_parts, index.stride_bytes, index.payload_bytes, index.fingerprint) == (
            len(self.folders),
            geometry.stride_bytes,
            geometry.payload_bytes,
            geometry.fingerprint,
        )
        return index, same_pool and same_layout and index.role == FileRole.INDEX

    def _remove_other_indexes(self) -> None:
        """A folder that was the first of other folders has an index that no data file belongs to any more."""
        for path in (folder / "index" for folder in self.folders[1:]):
            if path.is_file() and not path.is_symlink() and path.lstat().st_uid == os.geteuid():
                path.unlink()
                log.warning("%s is of an earlier run with other NVMe paths; its blocks are reclaimed", path)

    def _allocate(self, geometry: Geometry, floor_bytes: int) -> None:
        parts = len(self.folders)
        wanted = [(self.folders[0] / "index", self.index_fd, geometry.index_bytes)]
        wanted += [
            (folder / "data", fd, geometry.data_bytes(part, parts))
            for part, (folder, fd) in enumerate(zip(self.folders, self.data_fds, strict=True))
        ]
        for _, fd, size in wanted:
            if os.fstat(fd).st_size > size:  # a smaller tier than last time gives its space back first
                os.ftruncate(fd, size)
        _check_space(wanted, floor_bytes)
        for path, fd, size in wanted:
            try:
                os.posix_fallocate(fd, 0, size)
            except OSError as error:
                free = _free_bytes(fd)
                raise StorageError(
                    f"cannot reserve {size} bytes for {path}: {error.strerror} ({free} bytes free); "
                    "lower memory.nvme_capacity_mb or choose another path"
                ) from error

    def _write_superblocks(self, geometry: Geometry) -> None:
        """Headers of another layout are wiped before the new superblock says that the file is of this one."""
        parts = len(self.folders)
        pool_id = self.previous.pool_id if self.previous is not None and self.reusable else os.urandom(16)
        if not self.reusable:
            _zero(self.index_fd, PAGE_BYTES, geometry.index_bytes)
            os.fdatasync(self.index_fd)
        elif self.previous is not None and self.previous.num_slots > geometry.num_slots:
            # Their payloads were cut off; growing again must not bring their headers back.
            _zero(self.index_fd, PAGE_BYTES + geometry.num_slots * HEADER_BYTES, geometry.index_bytes)
        common = (
            parts,
            geometry.num_slots,
            geometry.stride_bytes,
            geometry.payload_bytes,
            geometry.fingerprint,
            pool_id,
        )
        for part, fd in enumerate(self.data_fds):
            _pwrite_all(fd, Superblock(FileRole.DATA, part, *common).pack(), 0)
        _pwrite_all(self.index_fd, Superblock(FileRole.INDEX, 0, *common).pack(), 0)
        os.fsync(self.index_fd)

    def _reopen_direct(self, folder: Path, buffered_fd: int) -> int:
        path = folder / "data"
        try:
            fd = self._open(path, os.O_DIRECT)
            probe = mmap.mmap(-1, PAGE_BYTES)
            os.preadv(fd, [probe], 0)
        except (OSError, StorageError) as error:
            if self.io_mode == "direct":
                log.warning("%s does not take direct I/O (%s); using buffered I/O, which is slower", path, error)
            self.io_mode = "buffered"
            return buffered_fd
        return fd


def check_folders(directory: Path, names: Sequence[str], num_bytes: int, free_space_floor_bytes: int) -> None:
    """Refuse, before anything large is loaded, folders that ``PoolFiles`` is going to refuse.

    Whether another process uses them is not asked: an earlier server may be about to end.

    Args:
        directory: absolute, existing.
        names: sub-directories of the ranks; are made.
        num_bytes: roughly what the files of all of them will take.
        free_space_floor_bytes: space that must stay free.

    Raises:
        StorageError: one is somebody else's or cannot be made, or there is too little space.
    """
    folders = [_own_folder(directory, name) for name in names]
    held = sum(path.lstat().st_blocks * 512 for folder in folders for path in folder.iterdir())
    stats = os.statvfs(directory)
    _require_space(directory, max(0, num_bytes - held), free_space_floor_bytes, stats.f_bavail * stats.f_frsize)


def _own_folder(directory: Path, name: str) -> Path:
    if not directory.is_absolute():
        raise StorageError(f"NVMe path {directory} is relative; did you mean {Path.cwd() / directory}?")
    if not directory.is_dir():
        raise StorageError(f"NVMe path {directory} is not a directory; create it or name another")
    folder = directory / name
    try:
        folder.mkdir(mode=_DIR_MODE, exist_ok=True)
        info = folder.lstat()
    except OSError as error:
        raise StorageError(f"cannot create {folder}: {error.strerror}") from error
    _check_owner(info, folder)
    return folder


def _check_owner(info: os.stat_result, path: Path) -> None:
    if info.st_uid != os.geteuid():
        raise StorageError(f"{path} belongs to user {info.st_uid}, not to this process's user {os.geteuid()}")


def _lock(folder: Path) -> int:
    path = folder / "lock"
    try:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, _FILE_MODE)
    except OSError as error:
        raise StorageError(f"cannot open {path}: {error.strerror}") from error
    try:
        _check_owner(os.fstat(fd), path)
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.ftruncate(fd, 0)
        os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
    except OSError as error:
        owner = os.pread(fd, 32, 0).decode(errors="replace").strip()
        os.close(fd)
        raise StorageError(f"{folder} is in use by process {owner or 'unknown'}; one owner at a time") from error
    except StorageError:
        os.close(fd)
        raise
    return fd


def _check_space(wanted: Sequence[tuple[Path, int, int]], floor_bytes: int) -> None:
    """Sum per file system what is still to be allocated: several files may share one."""
    needed: dict[int, int] = {}
    example: dict[int, tuple[Path, int]] = {}
    for path, fd, size in wanted:
        info = os.fstat(fd)
        needed[info.st_dev] = needed.get(info.st_dev, 0) + max(0, size - info.st_blocks * 512)
        example[info.st_dev] = (path, fd)
    for device, need in needed.items():
        path, fd = example[device]
        _require_space(path, need, floor_bytes, _free_bytes(fd))


def _require_space(path: Path, need: int, floor_bytes: int, free: int) -> None:
    if need > 0 and need + floor_bytes > free:
        floor = f" and {floor_bytes} must stay free" if floor_bytes else ""
        raise StorageError(
            f"not enough space for {path}: {need} bytes needed{floor}, {free} free; "
            "lower memory.nvme_capacity_mb or choose another path"
        )


def _free_bytes(fd: int) -> int:
    stats = os.fstatvfs(fd)
    return stats.f_bavail * stats.f_frsize


def _zero(fd: int, start: int, end: int) -> None:
    chunk = bytes(min(end - start, 1024 * 1024))
    for offset in range(start, end, len(chunk) or 1):
        _pwrite_all(fd, chunk[: end - offset], offset)


def _pwrite_all(fd: int, data: bytes, offset: int) -> None:
    while data:
        count = os.pwrite(fd, data, offset)
        data, offset = data[count:], offset + count
