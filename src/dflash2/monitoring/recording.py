"""Records traffic for replays: when requests come and end, how long they are, which blocks they share; no text.

One JSON object a line, written when it happens:

* ``{"event": "start", "format": 1, "block_size": …}`` when the server starts,
* ``{"event": "arrival", "timestamp": …, "request": …, "input_length": …, "hash_ids": […], "session_id": …}``,
* ``{"event": "finish", "timestamp": …, "request": …, "output_length": …, "stop_reason": …}``.

``timestamp`` is in milliseconds since 1970, lengths are in tokens. ``hash_ids`` has one number for each full block of
the prompt, the same for the same content behind the same prefix. The hashes are keyed with a secret that is drawn at
start and written nowhere, so that nobody who has the file can test what a prompt may have been.
"""

from __future__ import annotations

import errno
import hashlib
import json
import logging
import os
import secrets
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dflash2.errors import StorageError
from dflash2.types import IntArray

logger = logging.getLogger(__name__)

RECORDING_FORMAT = 1
HASH_BYTES = 16
ID_BITS = 63
"""What is kept of a hash: a positive number in every JSON reader that knows 64-bit integers."""


class TrafficRecorder:
    """Appends to a file that only its owner may read. One thread.

    Args:
        path: the file; what is there already stays.
        block_size: tokens of a block.
        clock: seconds since 1970.

    Raises:
        StorageError: the file cannot be opened or written.
    """

    def __init__(self, path: Path, block_size: int, clock: Callable[[], float] = time.time) -> None:
        self._block_size = block_size
        self._clock = clock
        self._secret = secrets.token_bytes(32)
        self._path = path
        self._file: int | None = None
        try:
            self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
            self._append(event="start", format=RECORDING_FORMAT, block_size=block_size)
        except OSError as error:
            self.close()
            raise StorageError(f"cannot record traffic to {path}: {error.strerror or error}") from error

    def arrival(self, request_id: str, token_ids: IntArray, scope: tuple[str | None, ...], session: str | None) -> None:
        """A request has arrived.

        Args:
            request_id: unique among those that have not ended.
            token_ids: int32 ``[n]``, the prompt.
            scope: what else must be equal for blocks to be shared: adapter, tenant.
            session: the conversation, as the client names it; only its hash is written.
        """
        self._write(
            event="arrival",
            timestamp=self._milliseconds(),
            request=request_id,
            input_length=len(token_ids),
            hash_ids=self._hash_ids(repr(scope).encode(), token_ids),
            session_id=None if session is None else self._digest(b"session", session.encode()).hex(),
        )

    def finish(self, request_id: str, num_output_tokens: int, stop_reason: str | None) -> None:
        """A request has ended.

        Args:
            request_id: as on arrival.
            num_output_tokens: of all its answers.
            stop_reason: as the API reports it; None if it was cancelled or failed.
        """
        self._write(
            event="finish",
            timestamp=self._milliseconds(),
            request=request_id,
            output_length=num_output_tokens,
            stop_reason=stop_reason,
        )

    def close(self) -> None:
        """Idempotent."""
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def _write(self, **event: Any) -> None:
        """A disk that fails ends the recording, not the server."""
        if self._file is None:
            return
        try:
            self._append(**event)
        except OSError as error:
            logger.error("recording of traffic to %s has ended: %s", self._path, error.strerror or error)
            self.close()

    def _append(self, **event: Any) -> None:
        assert self._file is not None
        line = (json.dumps(event, separators=(",", ":")) + "\n").encode()
        if os.write(self._file, line) < len(line):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def _milliseconds(self) -> int:
        return round(self._clock() * 1e3)

    def _hash_ids(self, scope: bytes, token_ids: IntArray) -> list[int]:
        ids: list[int] = []
        parent = self._digest(b"scope", scope)
        tokens = token_ids.astype("<i4", copy=False)
        for start in range(0, len(tokens) - self._block_size + 1, self._block_size):
            parent = self._digest(parent, tokens[start : start + self._block_size].tobytes())
            ids.append(int.from_bytes(parent[:8], "little") >> (64 - ID_BITS))
        return ids

    def _digest(self, parent: bytes, content: bytes) -> bytes:
        length = len(parent).to_bytes(4, "little")
        return hashlib.blake2b(length + parent + content, digest_size=HASH_BYTES, key=self._secret).digest()
