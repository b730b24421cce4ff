"""What every pool offers, and the extras that fast paths look for.

A pool holds ``num_slots`` blocks of ``layout``. It knows nothing of block ids or of which slots are in use. Bytes
enter and leave through *rows*: a host buffer uint8 ``[m, stride_bytes]`` and an int32 vector saying which row
belongs to which slot, so that the slabs of a DRAM pool serve as the buffer of every other pool.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

from dflash2.types import BoolArray, ByteArray, IntArray, KVLayout, Tier


class BlockPool(Protocol):
    """Holds blocks at slots.

    ``gather`` and ``scatter`` may be called from several threads at once as long as no slot is named twice. Only the
    first ``layout.block_bytes`` bytes of a row carry meaning; the rest is padding of any content.
    """

    tier: Tier
    num_slots: int
    layout: KVLayout

    def gather(self, slots: IntArray, buffer: ByteArray, rows: IntArray, keys: ByteArray | None = None) -> BoolArray:
        """Copy the blocks at ``slots`` out into ``buffer[rows]``.

        Args:
            slots: int32 ``[n]``, distinct.
            buffer: uint8 ``[m, stride_bytes]``, C-contiguous.
            rows: int32 ``[n]``, distinct rows of ``buffer``.
            keys: uint8 ``[n, KEY_BYTES]``; a pool that stores keys refuses a block whose key differs.

        Returns:
            bool ``[n]``; False where the stored copy cannot be read or trusted. The row is then undefined.
        """
        ...

    def scatter(self, slots: IntArray, buffer: ByteArray, rows: IntArray, keys: ByteArray | None = None) -> BoolArray:
        """Copy ``buffer[rows]`` into the blocks at ``slots``; arguments as in ``gather``.

        Returns:
            bool ``[n]``; False where the block could not be stored. The slot then holds nothing.
        """
        ...

    def close(self) -> None:
        """Give the memory back. Idempotent; no other call may follow."""
        ...


@runtime_checkable
class HostAddressable(Protocol):
    """A pool whose blocks lie in host memory and can be used as buffer rows, without a copy."""

    @property
    def slabs(self) -> ByteArray:
        """uint8 ``[num_slots, stride_bytes]``, C-contiguous, every row aligned to ``PAGE_BYTES``; row = slot."""
        ...


@runtime_checkable
class LayerWise(Protocol):
    """A pool that can take blocks one layer at a time."""

    layout: KVLayout

    def scatter_layer(self, layer: int, slots: IntArray, buffer: ByteArray, rows: IntArray) -> None:
        """Copy one layer's K and V of ``buffer[rows]`` into the blocks at ``slots``; arguments as in ``gather``."""
        ...


@runtime_checkable
class SpreadsItself(Protocol):
    """A pool or copier that may have threads of its own for one ``gather`` or ``scatter``: nobody needs to cut it."""

    @property
    def spreads_itself(self) -> bool:
        """True if it does."""
        ...


def spreads_itself(mover: object) -> bool:
    """Whether it is such a pool or copier, and does."""
    return isinstance(mover, SpreadsItself) and mover.spreads_itself


class PieceCopier(Protocol):
    """Moves blocks between a device pool and host rows. A block is the concatenation of its pieces.

    Pieces are torch tensors of one shape, uint8 ``[num_slots, piece_bytes]``, contiguous: one for a block-contiguous
    pool, ``num_layers * 2`` for a layer-first pool. Both calls return after the bytes have arrived.
    """

    def gather(self, pieces: Sequence[Any], slots: IntArray, buffer: ByteArray, rows: IntArray) -> None:
        """Device to host: ``buffer[rows[i]] = concat(piece[slots[i]] for piece in pieces)``."""
        ...

    def scatter(self, pieces: Sequence[Any], slots: IntArray, buffer: ByteArray, rows: IntArray) -> None:
        """Host to device, the inverse of ``gather``."""
        ...
