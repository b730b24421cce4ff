"""KV cache and parameters of public models against arithmetic done by hand."""

from __future__ import annotations

from typing import Any

import pytest
from tests.doctor.models import (
    DEEPSEEK_V3,
    GEMMA_2_9B,
    LLAMA_3_1_405B,
    LLAMA_3_8B,
    MISTRAL_7B,
    MIXTRAL_8X7B,
    QWEN_2_5_72B,
    QWEN_3_30B_A3B,
)

from dflash2.doctor.model_shape import read_kv_shape
from dflash2.doctor.parameters import count_parameters, weight_bytes
from dflash2.errors import ModelError
from dflash2.types import KVLayout


def test_llama_3_8b() -> None:
    # K and V, 32 layers, 8 heads of 4096 / 32 = 128 numbers, 2 bytes: 2 * 32 * 8 * 128 * 2 = 131072 bytes a token.
    shape = read_kv_shape(LLAMA_3_8B)
    assert shape.bytes_per_token() == 131_072
    # 128 tokens: 131072 * 128 = 16777216 bytes, 16 MiB, whole pages already.
    assert (shape.block_bytes(128), shape.stride_bytes(128)) == (16_777_216, 16_777_216)
    # Two ranks have 4 heads each.
    assert shape.bytes_per_token(2) == 65_536
    assert shape.notes == ()


def test_qwen_2_5_72b() -> None:
    # 2 * 80 layers * 8 heads * 128 * 2 bytes = 327680; one head on each of 8 ranks: 40960; in fp8 half of it.
    shape = read_kv_shape(QWEN_2_5_72B)
    assert shape.bytes_per_token() == 327_680
    assert shape.bytes_per_token(8) == 40_960
    assert shape.block_bytes(128, 8) == 40_960 * 128 == 5_242_880
    assert read_kv_shape(QWEN_2_5_72B, "fp8").bytes_per_token(8) == 20_480
    assert (shape.num_windowed_layers, shape.window_tokens) == (0, 0)  # use_sliding_window is false


def test_mistral_7b() -> None:
    # As Llama 3 8B: 2 * 32 * 8 * 128 * 2 = 131072; every layer has a window of 4096, which is noted, not subtracted.
    shape = read_kv_shape(MISTRAL_7B)
    assert shape.bytes_per_token() == 131_072
    assert (shape.num_windowed_layers, shape.window_tokens) == (32, 4096)
    assert "32 of 32 layers look at the last 4096 tokens" in shape.notes[0]


def test_deepseek_v3() -> None:
    # One latent vector of 512 + 64 = 576 numbers a layer: 61 * 576 * 2 bytes = 70272, the same on every rank.
    shape = read_kv_shape(DEEPSEEK_V3)
    assert shape.bytes_per_token() == 70_272
    assert shape.bytes_per_token(8) == 70_272
    # A block of 128 tokens: 70272 * 128 = 8994816 bytes = 2196 pages of 4096.
    assert shape.stride_bytes(128, 8) == 8_994_816 == 2196 * 4096
    # 16 tokens: 1124352 bytes are 274.5 pages, so the stride is 275 pages.
    assert shape.stride_bytes(16) == 275 * 4096


def test_llama_3_1_405b() -> None:
    # 2 * 126 * 8 * 128 * 2 = 516096; 8 ranks: 64512; 16 ranks share 8 heads, so each head is kept twice: 64512 again.
    shape = read_kv_shape(LLAMA_3_1_405B)
    assert shape.bytes_per_token() == 516_096
    assert shape.bytes_per_token(8) == 64_512
    assert shape.bytes_per_token(16) == 64_512


def test_gemma_2_9b() -> None:
    # head_dim is 256, not 3584 / 16: 2 * 42 * 8 * 256 * 2 = 344064; every other layer, 21 of 42, has a window.
    shape = read_kv_shape(GEMMA_2_9B)
    assert shape.bytes_per_token() == 344_064
    assert (shape.num_windowed_layers, shape.window_tokens) == (21, 4096)


@pytest.mark.parametrize("config", [LLAMA_3_8B, QWEN_2_5_72B, GEMMA_2_9B])
def test_sizes_are_those_of_the_pools(config: dict[str, Any]) -> None:
    shape = read_kv_shape(config)
    layout = KVLayout(shape.num_layers, shape.heads_per_rank(4), shape.head_dim, 128, shape.dtype)
    assert shape.block_bytes(128, 4) == layout.block_bytes
    assert shape.stride_bytes(128, 4) == layout.stride_bytes


@pytest.mark.parametrize(
    ("config", "published"),
    [
        (LLAMA_3_8B, 8_030_261_248),
        (QWEN_2_5_72B, 72_706_203_648),
        (MISTRAL_7B, 7_241_732_096),
        (DEEPSEEK_V3, 671_026_419_200),  # without the layer for multi-token prediction
        (LLAMA_3_1_405B, 405_853_388_800),
        (GEMMA_2_9B, 9_241_705_984),
        (MIXTRAL_8X7B, 46_702_792_704),
        (QWEN_3_30B_A3B, 30_532_122_624),
    ],
)
def test_parameters_are_the_published_ones(config: dict[str, Any], published: int) -> None:
    assert count_parameters(config).total == published


def test_parameters_of_llama_3_8b_by_hand() -> None:
    # Attention: q and o 4096 * 4096 each, k and v 4096 * 1024 each = 41943040. Feed-forward: 3 * 4096 * 14336 =
    # 176160768. Two norms: 8192. Layer: 218112000; 32 of them and the last norm: 6979588096. Two matrices of
    # 128256 * 4096 = 525336576.
    count = count_parameters(LLAMA_3_8B)
    assert count.layers == 32 * 218_112_000 + 4096 == 6_979_588_096
    assert count.embedding == 2 * 525_336_576
    assert count.active_layers == count.layers


def test_active_parameters_of_deepseek_v3_by_hand() -> None:
    # An expert is 3 * 7168 * 2048 = 44040192; 256 are there, 8 are used: 58 layers * 248 experts are left out.
    count = count_parameters(DEEPSEEK_V3)
    assert count.layers - count.active_layers == 58 * 248 * 44_040_192
    # Published: 37 billion active, output matrix included.
    assert round((count.active_layers + count.output) / 1e9, 1) == 36.6


def test_flops_by_hand() -> None:
    # Llama 3 8B, 8192 tokens: 2 * 6979588096 * 8192 = 114353571364864; attention 4 * 4096 * 32 layers *
    # 8192 * 8192 / 2 pairs = 17592186044416.
    count = count_parameters(LLAMA_3_8B)
    assert count.prefill_flops(8192) == 114_353_571_364_864 + 17_592_186_044_416
    # With a window of 4096 on all layers: 4096 * (8192 - 2048) = 25165824 pairs instead of 33554432.
    assert count.prefill_flops(8192, 32, 4096) == 114_353_571_364_864 + 4 * 4096 * 32 * 25_165_824
    # A window that is longer than the text changes nothing.
    assert count.prefill_flops(8192, 32, 131072) == count.prefill_flops(8192)


@pytest.mark.parametrize(
    ("quantisation", "num_bytes"),
    [
        (None, 2 * 8_030_261_248),
        ({"quant_method": "fp8"}, 6_979_588_096 + 2 * 1_050_673_152),
        ({"quant_method": "awq", "bits": 4, "group_size": 128}, 6_979_588_096 * 4.15625 // 8 + 2 * 1_050_673_152),
        (
            {"quant_method": "compressed-tensors", "config_groups": {"a": {"weights": {"num_bits": 8}}}},
            6_979_588_096 + 2 * 1_050_673_152,
        ),
    ],
)
def test_weights(quantisation: dict[str, Any] | None, num_bytes: float) -> None:
    config = LLAMA_3_8B | {"quantization_config": quantisation}
    assert weight_bytes(config, count_parameters(config))[0] == num_bytes


def test_fp8_kv_that_the_checkpoint_asks_for() -> None:
    scheme = {"quant_method": "compressed-tensors", "kv_cache_scheme": {"num_bits": 8, "type": "float"}}
    shape = read_kv_shape(LLAMA_3_8B | {"quantization_config": scheme})
    assert shape.bytes_per_token() == 65_536
    assert "fp8 KV cache" in shape.notes[0]
    assert read_kv_shape(DEEPSEEK_V3).dtype == "bfloat16"  # fp8 weights say nothing of KV


def test_layer_types() -> None:
    kinds = ["linear_attention", "linear_attention", "linear_attention", "full_attention"] * 8
    shape = read_kv_shape(LLAMA_3_8B | {"layer_types": kinds})
    assert shape.bytes_per_token() == 131_072 // 4
    assert "24 layers keep a fixed state" in shape.notes[0]
    kinds = (["sliding_attention"] * 5 + ["full_attention"]) * 5 + ["sliding_attention"] * 2
    shape = read_kv_shape(LLAMA_3_8B | {"layer_types": kinds, "sliding_window": 512})
    assert (shape.num_windowed_layers, shape.window_tokens) == (27, 512)
    shape = read_kv_shape(LLAMA_3_8B | {"sliding_window_pattern": 6, "sliding_window": 512})
    assert shape.num_windowed_layers == 32 - 5


def test_the_text_part_of_a_larger_model() -> None:
    outer = {"model_type": "x", "hidden_size": 1, "dtype": "float32"}
    shape = read_kv_shape(outer | {"text_config": LLAMA_3_8B | {"dtype": "float16"}})
    assert shape.bytes_per_token() == 131_072


def test_layers_that_share_kv() -> None:
    assert read_kv_shape(LLAMA_3_8B | {"num_kv_shared_layers": 12}).num_layers == 20


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"num_hidden_layers": None}, "num_hidden_layers"),
        ({"num_attention_heads": 30}, "not a multiple"),
        ({"attn_layer_period": 8}, "attn_layer_period"),
        ({"layer_types": ["mamba"] * 32}, "no layer"),
    ],
)
def test_what_cannot_be_sized_is_refused(change: dict[str, Any], words: str) -> None:
    with pytest.raises(ModelError, match=words):
        read_kv_shape(LLAMA_3_8B | change)


def test_heads_that_cannot_be_divided() -> None:
    with pytest.raises(ModelError, match="8 KV heads cannot be divided among 3 ranks"):
        read_kv_shape(LLAMA_3_8B).bytes_per_token(3)
