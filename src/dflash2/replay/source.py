"""The lines of a trace: a file, a compressed file, or a stream."""

from __future__ import annotations

import gzip
import io
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, BinaryIO

from dflash2.errors import TraceError

STREAM = "-"
"""Stands for the standard input."""


class LineSource:
    """Reads lines one by one and knows how far it is.

    Args:
        raw: where the bytes come from, for ``read_bytes``.
        lines: the text.
        total_bytes: of ``raw``; None for a stream.
        name: for messages.
    """

    def __init__(self, raw: BinaryIO | None, lines: IO[str], total_bytes: int | None, name: str) -> None:
        self._raw = raw
        self._lines = lines
        self.total_bytes = total_bytes
        self.name = name
        self.line_number = 0

    @property
    def read_bytes(self) -> int:
        """Bytes of the file taken so far; ahead of the line by a buffer at most."""
        return 0 if self._raw is None else self._raw.tell()

    def __iter__(self) -> Iterator[str]:
        """Lines that are not empty, without their end."""
        try:
            for line in self._lines:
                self.line_number += 1
                if text := line.strip():
                    yield text
        except (OSError, EOFError, UnicodeDecodeError) as error:
            raise self.error(f"cannot be read: {error}") from error

    def error(self, message: str) -> TraceError:
        """An error that names the line read last."""
        return TraceError(f"{self.name}, line {self.line_number}: {message}")


@contextmanager
def open_source(path: str) -> Iterator[LineSource]:
    """Open a trace.

    Args:
        path: a file, compressed if it ends in ``.gz``, or ``-`` for the standard input, which is read line by line.

    Raises:
        TraceError: it cannot be opened.
    """
    if path == STREAM:
        yield LineSource(None, sys.stdin, None, "standard input")
        return
    try:
        raw = Path(path).open("rb")  # noqa: SIM115 - closed below
    except OSError as error:
        raise TraceError(f"cannot open the trace {path}: {error.strerror or error}") from error
    with raw:
        total = Path(path).stat().st_size
        if path.endswith(".gz"):
            with gzip.open(raw, "rt", encoding="utf-8") as lines:
                yield LineSource(raw, lines, total, path)
        else:
            with io.TextIOWrapper(raw, encoding="utf-8") as lines:
                yield LineSource(raw, lines, total, path)
