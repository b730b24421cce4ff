"""File calls around file calls: faults and slowness under the NVMe tier, for tests and experiments. They nest."""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from dflash2.pools.fileops import FileOps


@dataclass(frozen=True, slots=True)
class FileCall:
    """One call as the wrappers see it.

    Attributes:
        operation: which.
        index: how many calls this wrapper saw before.
        offset: position in the file.
        nbytes: bytes asked for; headers have 512 at most, payloads at least a page each.
    """

    operation: Literal["read", "write"]
    index: int
    offset: int
    nbytes: int

    def touches(self, offset: int) -> bool:
        """True if the byte at ``offset`` is among those asked for."""
        return self.offset <= offset < self.offset + self.nbytes

    @property
    def is_payload(self) -> bool:
        """False for headers."""
        return self.nbytes > 512


When: TypeAlias = Callable[[FileCall], bool]


class _FileWrapper:
    def __init__(self, inner: FileOps, when: When) -> None:
        self._inner = inner
        self._when = when
        self._seen = 0
        self._lock = threading.Lock()

    def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        """See ``FileOps``."""
        if self._chosen("read", buffers, offset):
            return self._read(fd, buffers, offset)
        return self._inner.preadv(fd, buffers, offset)

    def pwritev(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        """See ``FileOps``."""
        if self._chosen("write", buffers, offset):
            return self._write(fd, buffers, offset)
        return self._inner.pwritev(fd, buffers, offset)

    def _chosen(self, operation: Literal["read", "write"], buffers: Sequence[memoryview], offset: int) -> bool:
        with self._lock:
            index = self._seen
            self._seen += 1
        return self._when(FileCall(operation, index, offset, sum(len(b) for b in buffers)))

    def _read(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        return self._inner.preadv(fd, buffers, offset)

    def _write(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        return self._inner.pwritev(fd, buffers, offset)


class FailingFiles(_FileWrapper):
    """Chosen calls raise OSError with ``error_number``."""

    def __init__(self, inner: FileOps, when: When, error_number: int = errno.EIO) -> None:
        super().__init__(inner, when)
        self._error_number = error_number

    def _read(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        raise OSError(self._error_number, os.strerror(self._error_number))

    _write = _read


class ShortFiles(_FileWrapper):
    """Chosen calls move at most ``max_bytes`` bytes."""

    def __init__(self, inner: FileOps, when: When, max_bytes: int) -> None:
        super().__init__(inner, when)
        self._max_bytes = max_bytes

    def _read(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        return self._inner.preadv(fd, [buffers[0][: self._max_bytes]], offset)

    def _write(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        return self._inner.pwritev(fd, [buffers[0][: self._max_bytes]], offset)


class CorruptingFiles(_FileWrapper):
    """One bit of what chosen reads return is flipped."""

    def _read(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        count = self._inner.preadv(fd, buffers, offset)
        if count:
            buffers[0][0] ^= 1
        return count


class PacedFiles(_FileWrapper):
    """Chosen calls together move ``bytes_per_s`` at most, as a device does whose write cache is full.

    ``bytes_per_s`` may be changed at any time; None means no limit.
    """

    def __init__(self, inner: FileOps, when: When, bytes_per_s: float | None) -> None:
        super().__init__(inner, when)
        self.bytes_per_s = bytes_per_s
        self._free_at = 0.0

    def _read(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        self._pay(sum(len(b) for b in buffers))
        return self._inner.preadv(fd, buffers, offset)

    def _write(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        self._pay(sum(len(b) for b in buffers))
        return self._inner.pwritev(fd, buffers, offset)

    def _pay(self, nbytes: int) -> None:
        if self.bytes_per_s is None:
            return
        with self._lock:
            start = max(self._free_at, time.monotonic())
            self._free_at = start + nbytes / self.bytes_per_s
            wait_s = self._free_at - time.monotonic()
        time.sleep(max(0.0, wait_s))


class GatedFiles(_FileWrapper):
    """Chosen calls wait until ``gate`` is set: a device that hangs."""

    def __init__(self, inner: FileOps, when: When, gate: threading.Event) -> None:
        super().__init__(inner, when)
        self._gate = gate

    def _read(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        self._gate.wait()
        return self._inner.preadv(fd, buffers, offset)

    def _write(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        self._gate.wait()
        return self._inner.pwritev(fd, buffers, offset)


def payload_writes(call: FileCall) -> bool:
    """Chooses every write of a payload."""
    return call.operation == "write" and call.is_payload


def payload_reads(call: FileCall) -> bool:
    """Chooses every read of a payload."""
    return call.operation == "read" and call.is_payload
