"""The HBM pool seen as matrices of rows, and the scratch memory into which rows are gathered."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from dflash2.types import KVLayout


class PagedPool:
    """The HBM pool as the two matrices that a layer needs: one row per token, and one row per block.

    Args:
        pool: contiguous ``[num_slots, num_layers, 2, block_size, num_kv_heads, head_dim]``.
        layout: the shape of one block.

    Attributes:
        token_rows: ``[num_slots * num_layers * 2 * block_size, num_kv_heads * head_dim]``, a view of the pool.
        block_rows: ``[num_slots * num_layers * 2, block_size * num_kv_heads * head_dim]``, a view of the pool.

    Raises:
        ValueError: the tensor does not have the layout's shape or dtype, or is not contiguous.
    """

    def __init__(self, pool: torch.Tensor, layout: KVLayout) -> None:
        if tuple(pool.shape[1:]) != layout.block_shape:
            raise ValueError(f"pool has blocks of shape {tuple(pool.shape[1:])}, the layout says {layout.block_shape}")
        if pool.dtype != getattr(torch, layout.dtype):
            raise ValueError(f"pool has dtype {pool.dtype}, the layout says {layout.dtype}")
        if not pool.is_contiguous():
            raise ValueError("the pool must be contiguous")
        self.layout = layout
        self.device = pool.device
        self.num_slots = int(pool.shape[0])
        token_width = layout.num_kv_heads * layout.head_dim
        self.token_rows = pool.view(-1, token_width)
        self.block_rows = pool.view(-1, layout.block_size * token_width)
        # A slot holds K of layer 0, V of layer 0, K of layer 1, and so on.
        self._halves = np.arange(layout.num_layers * 2, dtype=np.int64).reshape(-1, 2, 1)

    def rows_of_blocks(self, slots: npt.NDArray[np.int64]) -> torch.Tensor:
        """Rows of ``block_rows``, K and V of each layer: int64 ``[num_layers, 2, n]`` for n slots."""
        return torch.from_numpy(slots * self._halves.size + self._halves).to(self.device)

    def rows_of_tokens(self, slots: npt.NDArray[np.int64], offsets: npt.NDArray[np.int64]) -> torch.Tensor:
        """Rows of ``token_rows``: int64 ``[num_layers, 2, n]`` for n tokens, each at an offset in a slot."""
        rows = (slots * self._halves.size + self._halves) * self.layout.block_size + offsets
        return torch.from_numpy(rows).to(self.device)


class GatherWorkspace:
    """Memory for K and V of one layer's gathered blocks, kept between steps so that they allocate nothing.

    Args:
        pool: gives width, dtype and device of the rows.
    """

    def __init__(self, pool: PagedPool) -> None:
        self._like = pool.block_rows
        self._buffer = self._like.new_empty(2, 0, self._like.shape[1])

    def reserve(self, num_blocks: int) -> None:
        """Make room. Buffers taken earlier no longer belong to this workspace."""
        if num_blocks > self._buffer.shape[1]:
            rows = 1 << (num_blocks - 1).bit_length()
            self._buffer = self._like.new_empty(2, rows, self._like.shape[1])

    def take(self, num_blocks: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Two matrices ``[num_blocks, block_width]``, for K and V; every call returns the same memory.

        Raises:
            ValueError: more than was reserved.
        """
        if num_blocks > self._buffer.shape[1]:
            raise ValueError(f"{num_blocks} blocks asked for, {self._buffer.shape[1]} reserved")
        return self._buffer[0, :num_blocks], self._buffer[1, :num_blocks]
