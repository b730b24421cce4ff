"""Remembers which block_keys were computed, to count recomputed tokens."""

from __future__ import annotations


class ComputedKeys:
    """A bounded memory of keys: the oldest is forgotten first.

    Args:
        limit: keys remembered; about 100 bytes each.
    """

    def __init__(self, limit: int = 1_000_000) -> None:
        self._limit = limit
        self._seen: dict[int, None] = {}

    def note(self, key: bytes) -> bool:
        """Remember ``key``; True if it had been computed before."""
        short = int.from_bytes(key[:8], "little")
        if short in self._seen:
            return True
        if len(self._seen) >= self._limit:
            del self._seen[next(iter(self._seen))]
        self._seen[short] = None
        return False
