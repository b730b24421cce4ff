"""Pools around pools, for tests and experiments: each adds one fault or one limit, and they nest.

A wrapped pool is not host-addressable, so every byte passes through the wrapper. Faults of the NVMe tier are better
put under it, with ``file_wrappers``: its checksums and its error handling are then part of what is tested.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Literal, TypeAlias

import numpy as np

from dflash2.pools.base import BlockPool
from dflash2.types import BoolArray, ByteArray, IntArray

Operation: TypeAlias = Literal["gather", "scatter"]


class PoolWrapper:
    """Hands everything through; the others override what they change.

    Args:
        inner: the pool around which it lies.
    """

    def __init__(self, inner: BlockPool) -> None:
        self.inner = inner
        self.tier = inner.tier
        self.num_slots = inner.num_slots
        self.layout = inner.layout

    def gather(self, slots: IntArray, buffer: ByteArray, rows: IntArray, keys: ByteArray | None = None) -> BoolArray:
        """See ``BlockPool.gather``."""
        return self.inner.gather(slots, buffer, rows, keys)

    def scatter(self, slots: IntArray, buffer: ByteArray, rows: IntArray, keys: ByteArray | None = None) -> BoolArray:
        """See ``BlockPool.scatter``."""
        return self.inner.scatter(slots, buffer, rows, keys)

    def close(self) -> None:
        """Close the inner pool."""
        self.inner.close()


class LimitPool(PoolWrapper):
    """Stores ``max_blocks`` blocks in all; further ones fail as if the tier were full. Thread-safe."""

    def __init__(self, inner: BlockPool, max_blocks: int) -> None:
        super().__init__(inner)
        self.blocks_left = max_blocks
        self._lock = threading.Lock()

    def scatter(self, slots: IntArray, buffer: ByteArray, rows: IntArray, keys: ByteArray | None = None) -> BoolArray:
        """Store as many as the limit allows, in order."""
        with self._lock:
            allowed = min(self.blocks_left, len(slots))
            self.blocks_left -= allowed
        ok: BoolArray = np.zeros(len(slots), dtype=np.bool_)
        head = None if keys is None else keys[:allowed]
        ok[:allowed] = self.inner.scatter(slots[:allowed], buffer, rows[:allowed], head)
        return ok


class FailPool(PoolWrapper):
    """Fails the blocks that ``fails(operation, slot)`` picks; with ``error`` the whole call raises instead."""

    def __init__(
        self, inner: BlockPool, fails: Callable[[Operation, int], bool], error: Exception | None = None
    ) -> None:
        super().__init__(inner)
        self._fails = fails
        self._error = error

    def gather(self, slots: IntArray, buffer: ByteArray, rows: IntArray, keys: ByteArray | None = None) -> BoolArray:
        """The inner pool's result, less the chosen blocks."""
        good = self._good("gather", slots)
        ok = good.copy()
        ok[good] = self.inner.gather(slots[good], buffer, rows[good], None if keys is None else keys[good])
        return ok

    def scatter(self, slots: IntArray, buffer: ByteArray, rows: IntArray, keys: ByteArray | None = None) -> BoolArray:
        """The inner pool's result, less the chosen blocks."""
        good = self._good("scatter", slots)
        ok = good.copy()
        ok[good] = self.inner.scatter(slots[good], buffer, rows[good], None if keys is None else keys[good])
        return ok

    def _good(self, operation: Operation, slots: IntArray) -> BoolArray:
        good = np.array([not self._fails(operation, slot) for slot in slots.tolist()], dtype=np.bool_)
        if self._error is not None and not good.all():
            raise self._error
        return good


class CorruptPool(PoolWrapper):
    """Flips one bit of what is read from the slots that ``corrupts`` picks, and says nothing."""

    def __init__(self, inner: BlockPool, corrupts: Callable[[int], bool]) -> None:
        super().__init__(inner)
        self._corrupts = corrupts

    def gather(self, slots: IntArray, buffer: ByteArray, rows: IntArray, keys: ByteArray | None = None) -> BoolArray:
        """The inner pool's bytes, spoilt."""
        ok = self.inner.gather(slots, buffer, rows, keys)
        for slot, row in zip(slots.tolist(), rows.tolist(), strict=True):
            if self._corrupts(slot):
                buffer[row, 0] ^= 1
        return ok


class DelayPool(PoolWrapper):
    """Waits ``delay_s`` before each call; ``gate``, if given, must be set before a call goes on."""

    def __init__(
        self,
        inner: BlockPool,
        delay_s: float = 0.0,
        gate: threading.Event | None = None,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        super().__init__(inner)
        self._delay_s = delay_s
        self._gate = gate
        self._sleep = sleep

    def gather(self, slots: IntArray, buffer: ByteArray, rows: IntArray, keys: ByteArray | None = None) -> BoolArray:
        """Late."""
        self._pause()
        return self.inner.gather(slots, buffer, rows, keys)

    def scatter(self, slots: IntArray, buffer: ByteArray, rows: IntArray, keys: ByteArray | None = None) -> BoolArray:
        """Late."""
        self._pause()
        return self.inner.scatter(slots, buffer, rows, keys)

    def _pause(self) -> None:
        if self._delay_s:
            self._sleep(self._delay_s)
        if self._gate is not None:
            self._gate.wait()
