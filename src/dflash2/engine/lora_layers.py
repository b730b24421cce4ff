"""LoRA in the model: slots for adapters on the device, and the products that they add to linear layers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn

from dflash2.engine.batch import StepBatch
from dflash2.engine.packed_linear import PackedLinear
from dflash2.pipeline.adapter_file import AdapterWeights, Array, Targets


@dataclass(frozen=True, slots=True)
class _Rows:
    """Rows of a packed batch that belong to one adapter: a slice where they are neighbours, else their indices."""

    slot: int
    at: slice | torch.Tensor


class LoraLayers:
    """Adds ``scale * B @ A @ x`` to the rows of each adapter, one pair of products for each adapter and layer.

    All memory is taken here, once: ``num_slots`` adapters of rank ``max_rank`` in every linear layer of the decoder's
    blocks. Rows without an adapter are computed as without this class, bit for bit.

    Args:
        model: its linear layers get a hook, which ``close`` removes.
        num_slots: adapters on the device.
        max_rank: the largest.
        dtype: of the model's weights.
    """

    def __init__(self, model: nn.Module, num_slots: int, max_rank: int, dtype: torch.dtype) -> None:
        device = next(model.parameters()).device
        modules = adaptable_layers(model)
        self.targets: Targets = {name: (m.in_features, m.out_features) for name, m in modules.items()}
        room = partial(torch.zeros, dtype=dtype, device=device)
        self._a = {name: room((num_slots, max_rank, num_in)) for name, (num_in, _) in self.targets.items()}
        self._b = {name: room((num_slots, max_rank, num_out)) for name, (_, num_out) in self.targets.items()}
        """B transposed, so that the rows of a smaller rank are one piece."""
        self._scales: list[dict[str, tuple[int, float]]] = [{} for _ in range(num_slots)]
        """For each slot the layers that its adapter has, with rank and scale."""
        stream: Any = torch.cuda.Stream
        self._copies = stream(device) if device.type == "cuda" else None
        """Copies do not stand in the way of the model's kernels."""
        self._rows: list[_Rows] = []
        self._hooks = [module.register_forward_hook(self._hook(name)) for name, module in modules.items()]

    @property
    def num_bytes(self) -> int:
        """On the device."""
        return sum(t.numel() * t.element_size() for t in (*self._a.values(), *self._b.values()))

    def fill(self, slot: int, weights: AdapterWeights) -> None:
        """Copy an adapter into a slot that no step uses. May be called from another thread.

        Without torch's parallel operators where the device is a CPU: they would slow the model's thread down.
        """
        if self._copies is None:
            self._copy(slot, weights)
        else:
            with torch.cuda.stream(self._copies):
                self._copy(slot, weights)
            self._copies.synchronize()
        self._scales[slot] = {name: (layer.a.shape[0], layer.scale) for name, layer in weights.items()}

    @contextmanager
    def rows_of(self, batch: StepBatch) -> Iterator[None]:
        """The adapters of the batch's rows, for the forward pass inside the block."""
        self._rows = _rows(batch, next(iter(self._a.values())).device)
        try:
            yield
        finally:
            self._rows = []

    def close(self) -> None:
        """Leave the model as it was. Idempotent."""
        for hook in self._hooks:
            hook.remove()

    def _copy(self, slot: int, weights: AdapterWeights) -> None:
        for name, layer in weights.items():
            rank = layer.a.shape[0]
            copy_numbers(self._a[name][slot, :rank], layer.a)
            copy_numbers(self._b[name][slot, :rank], layer.b.T)

    def _hook(self, name: str) -> Any:
        a, b = self._a[name], self._b[name]

        def add(module: nn.Module, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
            for rows in self._rows:
                ranked = self._scales[rows.slot].get(name)
                if ranked is None:
                    continue
                rank, scale = ranked
                down, up = a[rows.slot, :rank], b[rows.slot, :rank]
                x, y = inputs[0][0], output[0]
                if isinstance(rows.at, slice):
                    y[rows.at].addmm_(x[rows.at] @ down.T, up, alpha=scale)
                else:
                    y.index_add_(0, rows.at, (x.index_select(0, rows.at) @ down.T) @ up, alpha=scale)

        return add


def adaptable_layers(model: nn.Module) -> dict[str, Any]:
    """The linear layers of the decoder's blocks, by name."""
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear | PackedLinear) and ".layers." in name
    }


def _rows(batch: StepBatch, device: torch.device) -> list[_Rows]:
    """The rows of each adapter in the batch."""
    if not any(slot is not None for slot in batch.adapter_slots):
        return []
    ends = np.cumsum(batch.query_lens)
    found: dict[int, list[tuple[int, int]]] = {}
    for slot, start, end in zip(batch.adapter_slots, (ends - batch.query_lens).tolist(), ends.tolist(), strict=True):
        if slot is not None:
            found.setdefault(slot, []).append((start, end))
    rows = []
    for slot, spans in found.items():
        first, last = spans[0][0], spans[-1][1]
        if last - first == sum(end - start for start, end in spans):
            rows.append(_Rows(slot, slice(first, last)))
        else:
            indices = np.concatenate([np.arange(start, end) for start, end in spans])
            rows.append(_Rows(slot, torch.from_numpy(indices).to(device)))
    return rows


def copy_numbers(target: torch.Tensor, source: Array) -> None:
    """Numbers of a file, bfloat16 as uint16, to a matrix of the device."""
    is_bfloat16 = source.dtype == np.uint16
    if target.device.type == "cpu" and target.dtype is torch.float32:
        wide = (source.astype(np.uint32) << 16).view(np.float32) if is_bfloat16 else source
        np.copyto(target.numpy(), wide)
        return
    tensor = torch.from_numpy(np.ascontiguousarray(source))
    target.copy_(tensor.view(torch.bfloat16) if is_bfloat16 else tensor)
