"""Packed linear layers compute what the plain ones do."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from dflash2.engine import packed_linear
from dflash2.engine.packed_linear import PackedLinear, can_pack, pack_linear_layers


@pytest.mark.parametrize("rows", [1, 3, 12, 70])
@pytest.mark.parametrize("bias", [False, True])
def test_same_product_as_plain(rows: int, bias: bool) -> None:
    torch.manual_seed(rows)
    plain = nn.Linear(96, 160, bias=bias)
    x = torch.randn(1, rows, 96)
    with torch.inference_mode():
        torch.testing.assert_close(PackedLinear(plain)(x), plain(x), rtol=1e-5, atol=1e-5)


def test_few_different_numbers_of_rows_reach_onednn(monkeypatch: pytest.MonkeyPatch) -> None:
    """It keeps memory for each."""
    layer = PackedLinear(nn.Linear(8, 8, bias=False))
    seen = []

    def product(rows: torch.Tensor, *_: object) -> torch.Tensor:
        seen.append(len(rows))
        return rows + 1

    monkeypatch.setattr(packed_linear, "_mkldnn", SimpleNamespace(_linear_pointwise=product))
    for count in range(1, 513):
        rows = torch.arange(count * 8.0).view(1, count, 8)
        torch.testing.assert_close(layer(rows), rows + 1)
    assert len(set(seen)) < 64
    assert seen[: packed_linear.EXACT_ROWS] == list(range(1, packed_linear.EXACT_ROWS + 1))


def test_packs_every_linear_layer_and_nothing_else() -> None:
    model = nn.Sequential(nn.Embedding(10, 8), nn.Sequential(nn.Linear(8, 8), nn.SiLU()), nn.Linear(8, 10))
    ids = torch.tensor([[1, 2, 3]])
    with torch.inference_mode():
        before = model(ids)
        pack_linear_layers(model)
        torch.testing.assert_close(model(ids), before, rtol=1e-5, atol=1e-5)
    assert not any(type(module) is nn.Linear for module in model.modules())
    assert set(model.state_dict()) == {"0.weight"}, "the plain weights are given up"


def test_only_float32_is_packed() -> None:
    assert not can_pack(nn.Linear(4, 4, dtype=torch.bfloat16))
    assert not can_pack(nn.Linear(4, 4, device="meta"))
