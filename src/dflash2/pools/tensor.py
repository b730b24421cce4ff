"""The HBM tier on a torch device: one block-contiguous tensor, or a view over an engine's layer-first tensors."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch

from dflash2.errors import CapacityError
from dflash2.pools.base import PieceCopier, spreads_itself
from dflash2.pools.page_memory import PageMemory
from dflash2.types import BoolArray, ByteArray, IntArray, KVLayout, Tier


class _PiecesPool:
    """A device pool as a list of pieces; the copier knows how to move them."""

    tier = Tier.HBM

    def __init__(self, num_slots: int, layout: KVLayout, pieces: list[torch.Tensor], copier: PieceCopier) -> None:
        if {tuple(piece.shape) for piece in pieces} != {(num_slots, layout.block_bytes // len(pieces))}:
            raise ValueError("the pieces of a pool must be alike, and be the whole block")  # copiers rely on it
        if len({piece.stride() for piece in pieces}) != 1:
            raise ValueError("the rows of all pieces of a pool must lie equally far apart")
        self.num_slots = num_slots
        self.layout = layout
        self.pieces = pieces
        self._copier = copier

    @property
    def device(self) -> str:
        """Torch device of the pieces."""
        return str(self.pieces[0].device)

    @property
    def spreads_itself(self) -> bool:
        """See ``pools.base.SpreadsItself``."""
        return spreads_itself(self._copier)

    def gather(self, slots: IntArray, buffer: ByteArray, rows: IntArray, keys: ByteArray | None = None) -> BoolArray:
        """See ``BlockPool.gather``. Raises RuntimeError if the device fails."""
        self._copier.gather(self.pieces, slots, buffer, rows)
        return np.ones(len(slots), dtype=np.bool_)

    def scatter(self, slots: IntArray, buffer: ByteArray, rows: IntArray, keys: ByteArray | None = None) -> BoolArray:
        """See ``BlockPool.scatter``. Raises RuntimeError if the device fails."""
        self._copier.scatter(self.pieces, slots, buffer, rows)
        return np.ones(len(slots), dtype=np.bool_)

    def copy_within(self, src_slots: IntArray, dst_slots: IntArray) -> None:
        """Copy blocks onto other slots of this pool, in the order of the steps that read and write them.

        Args:
            src_slots: int32 ``[n]``.
            dst_slots: int32 ``[n]``, distinct and none of ``src_slots``.
        """
        for piece in self.pieces:
            piece[torch.from_numpy(dst_slots).long()] = piece[torch.from_numpy(src_slots).long()]

    def close(self) -> None:
        """Drop the tensors."""
        self.pieces = []


class TensorPool(_PiecesPool):
    """Block-contiguous pool: one tensor ``[num_slots, num_layers, 2, block_size, num_kv_heads, head_dim]``.

    Taken once at start; its address never changes, so a step may read it in place and be captured in a graph.

    Args:
        num_slots: capacity in blocks.
        layout: shape of a block.
        copier: moves blocks between the device and host rows (``transfer.cpu_copy`` or ``transfer.cuda_copy``).
        device: torch device.

    Raises:
        CapacityError: the device or the system refuses the memory.
    """

    def __init__(
        self, num_slots: int, layout: KVLayout, copier: PieceCopier, device: torch.device | str = "cpu"
    ) -> None:
        dtype = getattr(torch, layout.dtype)
        shape = (num_slots, *layout.block_shape)
        self._memory: PageMemory | None = None
        if torch.device(device).type == "cpu":
            self._memory = PageMemory(max(1, num_slots * layout.block_bytes))
            used = self._memory.bytes[: num_slots * layout.block_bytes]
            self.tensor = torch.from_numpy(used).view(dtype).view(shape)
        else:
            try:
                self.tensor = torch.zeros(shape, dtype=dtype, device=device)
            except torch.OutOfMemoryError as error:
                need = num_slots * layout.block_bytes
                raise CapacityError(f"cannot take {need} bytes for KV on {device}: {error}") from error
        super().__init__(num_slots, layout, [_as_bytes(self.tensor, num_slots)], copier)

    def close(self) -> None:
        """Drop the tensor."""
        super().close()
        self.tensor = self.tensor[:0]
        if self._memory is not None:
            self._memory.close()


class LayerFirstPool(_PiecesPool):
    """View over an engine's own KV tensors, one pair per layer, where a block is scattered in ``layers * 2`` pieces.

    Below HBM the block has the order of ``KVLayout``: layer 0 K, layer 0 V, layer 1 K and so on.

    Args:
        keys: per layer, a tensor whose first dimension splits into ``num_slots`` blocks:
            ``[num_slots * block_size, heads, dim]`` or ``[num_slots, block_size, heads, dim]``.
        values: the same for V.
        layout: shape of a block; each layer's piece must have its size.
        copier: moves the pieces.

    Raises:
        ValueError: a tensor is not contiguous or does not fit ``layout``.
    """

    def __init__(
        self, keys: Sequence[torch.Tensor], values: Sequence[torch.Tensor], layout: KVLayout, copier: PieceCopier
    ) -> None:
        if len(keys) != layout.num_layers or len(values) != layout.num_layers:
            raise ValueError(f"expected {layout.num_layers} tensors each for K and V, got {len(keys)}, {len(values)}")
        piece_bytes = layout.block_bytes // (2 * layout.num_layers)
        tensors = [tensor for pair in zip(keys, values, strict=True) for tensor in pair]
        num_slots = tensors[0].nbytes // piece_bytes
        for tensor in tensors:
            if not tensor.is_contiguous():
                raise ValueError("layer-first KV tensors must be contiguous")
            if tensor.nbytes // piece_bytes != num_slots:
                raise ValueError(f"tensor of shape {tuple(tensor.shape)} does not hold {num_slots} blocks")
        # An engine may have padding slots at the end (SGLang's page 0 or a tail): whole blocks only.
        pieces = [_as_bytes(tensor, num_slots, piece_bytes) for tensor in tensors]
        super().__init__(num_slots, layout, pieces, copier)
        self._layer_bytes = 2 * piece_bytes

    def scatter_layer(self, layer: int, slots: IntArray, buffer: ByteArray, rows: IntArray) -> None:
        """See ``LayerWise.scatter_layer``. Raises RuntimeError if the device fails."""
        start = layer * self._layer_bytes
        pieces = self.pieces[2 * layer : 2 * layer + 2]
        self._copier.scatter(pieces, slots, buffer[:, start : start + self._layer_bytes], rows)


def _as_bytes(tensor: torch.Tensor, num_slots: int, row_bytes: int | None = None) -> torch.Tensor:
    """uint8 ``[num_slots, row_bytes]`` over the same memory."""
    if row_bytes is None:
        row_bytes = math.prod(tensor.shape[1:]) * tensor.element_size()
    flat = tensor.view(-1).view(torch.uint8)
    return flat[: num_slots * row_bytes].view(num_slots, row_bytes)


def free_device_bytes(device: torch.device | str) -> int | None:
    """Memory of the device that nobody uses; None if the device has none of its own (CPU)."""
    if torch.device(device).type == "cpu":
        return None
    free, _ = torch.cuda.mem_get_info(device)
    return int(free)


def allocator_bytes(device: torch.device | str) -> dict[str, int]:
    """What torch's caching allocator holds of the device and what of that is in use; empty on a CPU."""
    if torch.device(device).type == "cpu":
        return {}
    return {
        "reserved_bytes": torch.cuda.memory_reserved(device),
        "allocated_bytes": torch.cuda.memory_allocated(device),
    }


def total_device_bytes(device: torch.device | str) -> int | None:
    """All memory of the device; None if the device has none of its own (CPU)."""
    if torch.device(device).type == "cpu":
        return None
    _, total = torch.cuda.mem_get_info(device)
    return int(total)
