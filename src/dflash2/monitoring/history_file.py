"""The file of the history: a header with what is in it, the arrays, a checksum. Replaced as a whole, never changed."""

from __future__ import annotations

import json
import logging
import os
import struct
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt
import xxhash

from dflash2.types import FloatArray

logger = logging.getLogger(__name__)

MAGIC = b"DFLASH2H"
VERSION = 1
_PREFIX = struct.Struct("<8sII")
_DIGEST_BYTES = 8


class RingArrays(Protocol):
    """The arrays of one resolution: int64 ``[points]`` and float32 ``[points, curves]``."""

    resolution_s: int
    ticks: npt.NDArray[np.int64]
    values: FloatArray


def write_history(path: Path, names: Sequence[str], rings: Collection[RingArrays]) -> None:
    """Write all of it, then put it in place of what is there. Raises OSError."""
    shapes = [[ring.resolution_s, len(ring.ticks)] for ring in rings]
    header = json.dumps({"names": list(names), "rings": shapes}).encode()
    body = b"".join(
        [_PREFIX.pack(MAGIC, VERSION, len(header)), header]
        + [part for ring in rings for part in (ring.ticks.tobytes(), ring.values.tobytes())]
    )
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    beside = path.with_name(path.name + ".new")
    fd = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    with os.fdopen(fd, "wb") as stream:
        stream.write(body + xxhash.xxh3_64_digest(body))
        stream.flush()
        os.fsync(stream.fileno())
    beside.replace(path)


def read_history(path: Path, names: Sequence[str], rings: Collection[RingArrays]) -> None:
    """Fill the rings from a file. One that is absent, damaged or of another version leaves them empty, with a line.

    Curves are found by their names: one that is new has no past, one that is gone is not read.
    """
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return
    except OSError as error:
        logger.warning("the history in %s cannot be read: %s; it starts anew", path, error)
        return
    reason = _fill(data, names, rings)
    if reason:
        logger.warning("the history in %s is not used: %s; it starts anew", path, reason)


def _fill(data: bytes, names: Sequence[str], rings: Collection[RingArrays]) -> str:
    """Why nothing was filled; empty if all was."""
    body, digest = data[:-_DIGEST_BYTES], data[-_DIGEST_BYTES:]
    if len(body) < _PREFIX.size or xxhash.xxh3_64_digest(body) != digest:
        return "it is damaged"
    magic, version, header_bytes = _PREFIX.unpack_from(body)
    if (magic, version) != (MAGIC, VERSION):
        return f"it has version {version}, this release writes {VERSION}"
    header = json.loads(body[_PREFIX.size : _PREFIX.size + header_bytes])
    if header["rings"] != [[ring.resolution_s, len(ring.ticks)] for ring in rings]:
        return "its resolutions are others"
    at = _PREFIX.size + header_bytes
    kept = header["names"]
    columns = [(names.index(name), kept.index(name)) for name in kept if name in names]
    for ring in rings:
        points = len(ring.ticks)
        ring.ticks[:] = np.frombuffer(body, np.int64, points, at)
        at += 8 * points
        values = np.frombuffer(body, np.float32, points * len(kept), at).reshape(points, len(kept))
        at += 4 * points * len(kept)
        for here, there in columns:
            ring.values[:, here] = values[:, there]
    return ""
