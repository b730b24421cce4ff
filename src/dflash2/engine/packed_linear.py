"""Linear layers on a CPU with their weights in oneDNN's own order.

The product of a few rows, as in a decode step, reads every weight once; in this order it reads them as fast as
memory allows, two to three times as fast as from the plain matrix on some machines. Larger products take as long
as before. The plain weights are given up, so memory stays the same.
"""

from __future__ import annotations

import contextlib
import ctypes
from typing import Any

import torch
from torch import nn
from torch.nn import functional

_mkldnn: Any = torch.ops.mkldnn
EXACT_ROWS = 32
"""Up to so many rows, as in a decode step, none is computed in vain."""
ROW_STEP = 16
"""Beyond that the number of rows is a multiple of this.

oneDNN keeps what it makes for a number of rows and a size of matrix, some 0.4 MB each and up to 1,024 of them: prompts
of all lengths together took 450 MB.
"""
_ROWS_HINT = 8
"""Rows that oneDNN may expect. It chooses the same order for 3 and for 1,280."""


class PackedLinear(nn.Module):
    """``linear`` in float32 on a CPU, for inference only.

    Args:
        linear: its weight is copied into the packed order.
    """

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features = linear.in_features
        self.out_features = linear.out_features
        self._packed = _mkldnn._reorder_linear_weight(linear.weight.detach(), _ROWS_HINT)
        bias: torch.Tensor | None = linear.bias
        self._bias = bias.detach() if bias is not None else None

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """``[..., in_features]`` to ``[..., out_features]``."""
        flat = rows.reshape(-1, self.in_features)
        num_rows = len(flat)
        if num_rows > EXACT_ROWS:
            flat = functional.pad(flat, (0, 0, 0, -num_rows % ROW_STEP))
        product: torch.Tensor = _mkldnn._linear_pointwise(flat, self._packed, self._bias, "none", [], "")
        return product[:num_rows].view(*rows.shape[:-1], self.out_features)


def can_pack(model: nn.Module) -> bool:
    """Whether this torch has the operators, and the model is float32 on a CPU."""
    weight = next(model.parameters())
    known = all(hasattr(_mkldnn, name) for name in ("_reorder_linear_weight", "_linear_pointwise"))
    return known and weight.device.type == "cpu" and weight.dtype is torch.float32


def pack_linear_layers(model: nn.Module) -> None:
    """Replace every ``nn.Linear`` of a model in place; its state dict then lacks their weights.

    The plain weights go back to the operating system, as far as nobody else holds them.
    """
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is nn.Linear:
                setattr(parent, name, PackedLinear(child))
    with contextlib.suppress(AttributeError):  # a C library without it keeps the freed memory for itself
        ctypes.CDLL(None).malloc_trim(0)
