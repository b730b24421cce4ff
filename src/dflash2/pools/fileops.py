"""The file calls that can fail while the pool runs, in one place so that a test can make them fail."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Protocol


class FileOps(Protocol):
    """Positional vectored I/O; may be short, may raise OSError, may be called from several threads."""

    def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        """Read into ``buffers``; returns bytes read, 0 at end of file."""
        ...

    def pwritev(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        """Write ``buffers``; returns bytes written."""
        ...


class OsFileOps:
    """The operating system."""

    def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        """See ``FileOps``."""
        return os.preadv(fd, buffers, offset)

    def pwritev(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        """See ``FileOps``."""
        return os.pwritev(fd, buffers, offset)


def read_fully(ops: FileOps, fd: int, buffer: memoryview, offset: int) -> int:
    """Read until ``buffer`` is full or the file ends; returns bytes read. Raises OSError."""
    done = 0
    while done < len(buffer):
        count = ops.preadv(fd, [buffer[done:]], offset + done)
        if count == 0:
            break
        done += count
    return done


def write_fully(ops: FileOps, fd: int, buffer: memoryview, offset: int) -> int:
    """Write all of ``buffer``; returns how many calls it took. Raises OSError."""
    done = calls = 0
    while done < len(buffer):
        count = ops.pwritev(fd, [buffer[done:]], offset + done)
        if count == 0:
            raise OSError(5, "write returned 0 bytes")
        done += count
        calls += 1
    return calls
