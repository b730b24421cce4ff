"""Counts a decoder's parameters from its ``config.json``: all of them, and those that one token passes through.

Counted are embeddings, attention, feed-forward parts (gated unless the family is known not to be), experts, routers
and norms. For the families in the tests the count is the published one to the last digit; for others it is an estimate.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dflash2.doctor.model_shape import attention_heads, decoder_config, head_size, kv_heads, number, weight_dtype
from dflash2.types import DTYPE_BYTES

_UNGATED = frozenset({"gpt2", "gpt_neox", "gptj", "opt", "falcon", "phi", "starcoder2", "nemotron", "bloom", "mpt"})
_QKV_BIAS = frozenset({"qwen2", "qwen2_moe"})
_QK_NORM = frozenset({"qwen3", "qwen3_moe", "gemma3", "gemma3_text"})
_TIED = frozenset({"gemma", "gemma2", "gemma3", "gemma3_text", "gpt2"})
_FOUR_NORMS = frozenset({"gemma2", "gemma3", "gemma3_text"})


@dataclass(frozen=True, slots=True)
class ParameterCount:
    """Parameters of a model.

    Attributes:
        embedding: of the input and, if it is a matrix of its own, the output.
        layers: everything else.
        active_layers: of ``layers``, what one token passes through.
        output: of the output matrix, which one token passes through too.
        attention_width: query heads times the mean of K's and V's length, for the cost of attention.
        num_layers: decoder layers.
    """

    embedding: int
    layers: int
    active_layers: int
    output: int
    attention_width: float
    num_layers: int

    @property
    def total(self) -> int:
        """All parameters."""
        return self.embedding + self.layers

    def prefill_flops(self, num_tokens: int, num_windowed_layers: int = 0, window_tokens: int = 0) -> float:
        """Floating-point operations to compute the KV of ``num_tokens`` tokens from nothing.

        Two for each active parameter and token, and four for each pair of a token and one before it, for each number
        of a head (Q times K, and the weights times V). The output matrix is needed for one token only.
        """
        pairs = num_tokens * num_tokens / 2
        short = min(window_tokens, num_tokens)
        windowed_pairs = short * (num_tokens - short / 2)
        full = self.num_layers - num_windowed_layers
        attention = 4 * self.attention_width * (full * pairs + num_windowed_layers * windowed_pairs)
        return 2.0 * self.active_layers * num_tokens + attention


def count_parameters(config: Mapping[str, Any]) -> ParameterCount:
    """Count.

    Raises:
        ModelError: a figure is missing.
    """
    text = decoder_config(config)
    family = str(text.get("model_type", ""))
    hidden, num_layers = number(text, "hidden_size", "n_embd"), number(text, "num_hidden_layers", "n_layer")
    matrix = number(text, "vocab_size") * hidden
    tied = bool(text.get("tie_word_embeddings", family in _TIED))
    attention, width = _latent(text, hidden) if text.get("kv_lora_rank") else _grouped(text, hidden, family)
    norms = hidden * (4 if family in _FOUR_NORMS else 2)
    dense, sparse, active = _feed_forward(text, hidden, family)
    num_sparse = _num_sparse_layers(text, num_layers) if sparse else 0
    common = num_layers * (attention + norms) + (num_layers - num_sparse) * dense + hidden
    return ParameterCount(
        embedding=matrix * (1 if tied else 2),
        layers=common + num_sparse * sparse,
        active_layers=common + num_sparse * active,
        output=matrix,
        attention_width=width,
        num_layers=num_layers,
    )


def weight_bytes(config: Mapping[str, Any], count: ParameterCount) -> tuple[int, str]:
    """Bytes of the weights, estimated, and in words how."""
    text = decoder_config(config)
    dtype = weight_dtype(text)
    bits = _quantised_bits(text.get("quantization_config"))
    if bits is None:
        total = count.total * DTYPE_BYTES[dtype]
        return total, f"{count.total / 1e9:.2f} billion parameters in {dtype}"
    total = int(count.layers * bits / 8) + count.embedding * DTYPE_BYTES[dtype]
    return total, f"{count.total / 1e9:.2f} billion parameters, layers in {bits:g} bits, embeddings in {dtype}"


def _grouped(config: Mapping[str, Any], hidden: int, family: str) -> tuple[int, float]:
    queries, keys = attention_heads(config) * head_size(config), kv_heads(config) * head_size(config)
    total = hidden * (queries + 2 * keys) + queries * hidden
    if family in _QKV_BIAS or config.get("attention_bias") is True:
        total += queries + 2 * keys
    if config.get("attention_bias") is True and family not in _QKV_BIAS:
        total += hidden
    if family in _QK_NORM:
        total += 2 * head_size(config)
    return total, float(queries)


def _latent(config: Mapping[str, Any], hidden: int) -> tuple[int, float]:
    """Multi-head latent attention, as DeepSeek-V2 and V3 have it."""
    heads, latent = attention_heads(config), number(config, "kv_lora_rank")
    rope, plain = number(config, "qk_rope_head_dim"), number(config, "qk_nope_head_dim")
    value = number(config, "v_head_dim")
    queries = heads * (plain + rope)
    rank = config.get("q_lora_rank")
    query_part = hidden * rank + rank + rank * queries if isinstance(rank, int) and rank else hidden * queries
    key_part = hidden * (latent + rope) + latent + latent * heads * (plain + value)
    return query_part + key_part + heads * value * hidden, heads * (plain + rope + value) / 2


def _feed_forward(config: Mapping[str, Any], hidden: int, family: str) -> tuple[int, int, int]:
    """Parameters of a dense layer, of a layer of experts (0: there is none), and of that what one token uses."""
    matrices = 2 if family in _UNGATED else 3
    dense_width = config.get("intermediate_size") or config.get("n_inner") or 4 * hidden
    dense = matrices * hidden * int(dense_width)
    experts = next((int(config[name]) for name in ("n_routed_experts", "num_local_experts", "num_experts")
                    if config.get(name)), 0)  # fmt: skip
    if not experts:
        return dense, 0, 0
    width = int(config.get("moe_intermediate_size") or dense_width)
    one = matrices * hidden * width
    shared = int(config.get("n_shared_experts") or 0) * one
    if config.get("shared_expert_intermediate_size"):
        shared = matrices * hidden * int(config["shared_expert_intermediate_size"]) + hidden  # and its gate
    router = hidden * experts + (experts if config.get("topk_method") == "noaux_tc" else 0)
    used = number(config, "num_experts_per_tok")
    return dense, experts * one + shared + router, used * one + shared + router


def _num_sparse_layers(config: Mapping[str, Any], num_layers: int) -> int:
    first = int(config.get("first_k_dense_replace") or 0)
    step = int(config.get("decoder_sparse_step") or config.get("moe_layer_freq") or 1)
    return max(0, num_layers - first) // step


def _quantised_bits(settings: object) -> float | None:
    """Bits of a quantised weight, scales included; None if the weights are not quantised."""
    if not isinstance(settings, dict):
        return None
    for name in ("bits", "w_bit"):
        if isinstance(settings.get(name), int):
            return float(settings[name]) + _scale_bits(settings)
    if settings.get("load_in_4bit") is True:
        return 4.5
    method = str(settings.get("quant_method", "")).lower()
    if method == "mxfp4":
        return 4.25
    if method == "compressed-tensors":
        groups = settings.get("config_groups")
        schemes = [group.get("weights") or {} for group in groups.values()] if isinstance(groups, dict) else []
        return next((float(scheme["num_bits"]) for scheme in schemes if scheme.get("num_bits")), None)
    return 8.0 if "fp8" in method or "int8" in method or settings.get("load_in_8bit") is True else None


def _scale_bits(settings: Mapping[str, Any]) -> float:
    """A 16-bit scale and a zero point for each group of weights."""
    group = settings.get("group_size", settings.get("q_group_size", 128))
    return (16 + float(settings.get("bits") or settings.get("w_bit") or 4)) / group if group and group > 0 else 0.0
