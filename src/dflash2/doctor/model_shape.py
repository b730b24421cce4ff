"""What of a model's ``config.json`` decides the size of its KV cache.

Per token and layer, standard attention (MHA, GQA, MQA) keeps K and V of every KV head. Multi-head latent attention
keeps one vector of ``kv_lora_rank + qk_rope_head_dim`` numbers, the same on every rank (DeepSeek-V2, arXiv:2405.04434,
section 2.1).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dflash2.errors import ModelError
from dflash2.types import DTYPE_BYTES, PAGE_BYTES

KV_DTYPES = {"bfloat16": "bfloat16", "float16": "float16", "float32": "float32", "fp8": "float8_e4m3fn"}
"""Names on the command line, and as ``KVLayout`` spells them."""

_WITHOUT_KV = frozenset({"linear_attention", "mamba", "conv", "recurrent"})
_UNKNOWN_STATE = ("attn_layer_period", "layers_block_type", "hybrid_override_pattern", "ssm_cfg", "state_size")


@dataclass(frozen=True, slots=True)
class KVShape:
    """The KV cache of a model.

    Attributes:
        num_layers: layers that keep KV.
        num_kv_heads: of the whole model; 1 for latent attention.
        head_dim: of K and V; for latent attention the length of the one vector.
        latent: multi-head latent attention.
        dtype: a key of ``DTYPE_BYTES``.
        num_windowed_layers: layers that look at the last ``window_tokens`` only.
        window_tokens: 0 if no layer has a window.
        max_context_tokens: what the model allows; 0 if it does not say.
        notes: what the reader should know of these figures.
    """

    num_layers: int
    num_kv_heads: int
    head_dim: int
    latent: bool
    dtype: str
    num_windowed_layers: int
    window_tokens: int
    max_context_tokens: int
    notes: tuple[str, ...]

    def heads_per_rank(self, ranks: int) -> int:
        """KV heads of one rank; with more ranks than heads each rank keeps a copy of one.

        Raises:
            ModelError: the heads cannot be divided among the ranks.
        """
        if self.latent or self.num_kv_heads == 1:
            return 1
        if max(ranks, self.num_kv_heads) % min(ranks, self.num_kv_heads):
            raise ModelError(f"{self.num_kv_heads} KV heads cannot be divided among {ranks} ranks")
        return max(1, self.num_kv_heads // ranks)

    def bytes_per_token(self, ranks: int = 1) -> int:
        """On one rank."""
        vectors = 1 if self.latent else 2 * self.heads_per_rank(ranks)
        return self.num_layers * vectors * self.head_dim * DTYPE_BYTES[self.dtype]

    def block_bytes(self, block_size: int, ranks: int = 1) -> int:
        """Bytes of a block on one rank, as it lies in HBM."""
        return self.bytes_per_token(ranks) * block_size

    def stride_bytes(self, block_size: int, ranks: int = 1) -> int:
        """The same on DRAM and NVMe, padded to whole pages."""
        return -(-self.block_bytes(block_size, ranks) // PAGE_BYTES) * PAGE_BYTES


def decoder_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The language model's part of a configuration that describes several models."""
    text = config.get("text_config")
    return {**config, **text} if isinstance(text, dict) else config


def read_kv_shape(config: Mapping[str, Any], kv_dtype: str = "auto") -> KVShape:
    """Read a ``config.json``.

    Args:
        config: its content.
        kv_dtype: a key of ``KV_DTYPES``, or ``auto`` for what the file says.

    Raises:
        ModelError: a figure is missing, or the model keeps state that is not known here.
    """
    text = decoder_config(config)
    unknown = [key for key in _UNKNOWN_STATE if text.get(key) is not None]
    if unknown:
        raise ModelError(f"a model with {unknown[0]} keeps state besides KV, which this plan cannot size")
    notes: list[str] = []
    kinds = _layer_kinds(text, notes)
    windowed, window = _window(text, kinds, notes)
    latent = text.get("kv_lora_rank") is not None
    if latent:
        heads, head_dim = 1, number(text, "kv_lora_rank") + number(text, "qk_rope_head_dim")
        notes.append("latent attention: every rank keeps the whole KV cache; the reference engine does not run it")
    else:
        heads, head_dim = kv_heads(text), head_size(text)
    return KVShape(
        num_layers=len(kinds),
        num_kv_heads=heads,
        head_dim=head_dim,
        latent=latent,
        dtype=KV_DTYPES[kv_dtype] if kv_dtype != "auto" else _kv_dtype(text, notes),
        num_windowed_layers=windowed,
        window_tokens=window,
        max_context_tokens=int(text.get("max_position_embeddings") or 0),
        notes=tuple(notes),
    )


def number(config: Mapping[str, Any], *names: str) -> int:
    """The first of ``names`` that is there and is a positive whole number. Raises ModelError."""
    for name in names:
        value = config.get(name)
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            return value
    raise ModelError(f"the model's configuration has no positive {' or '.join(names)}")


def attention_heads(config: Mapping[str, Any]) -> int:
    """Query heads."""
    return number(config, "num_attention_heads", "n_head")


def kv_heads(config: Mapping[str, Any]) -> int:
    """KV heads; as many as query heads where the file does not say."""
    if config.get("multi_query") is True:
        return 1
    return number(config, "num_key_value_heads", "num_kv_heads", "num_attention_heads", "n_head")


def head_size(config: Mapping[str, Any]) -> int:
    """Length of one head's K or V."""
    if config.get("head_dim") is not None:
        return number(config, "head_dim")
    hidden, heads = number(config, "hidden_size", "n_embd"), attention_heads(config)
    if hidden % heads:
        raise ModelError(f"hidden_size {hidden} is not a multiple of {heads} heads, and head_dim is not given")
    return hidden // heads


def weight_dtype(config: Mapping[str, Any]) -> str:
    """The data type that the file names; bfloat16 where it names none."""
    value = str(config.get("dtype") or config.get("torch_dtype") or "bfloat16").removeprefix("torch.")
    return value if value in DTYPE_BYTES else "bfloat16"


def _layer_kinds(config: Mapping[str, Any], notes: list[str]) -> list[str]:
    """One entry per layer that keeps KV of its own."""
    total = number(config, "num_hidden_layers", "n_layer")
    written = config.get("layer_types")
    kinds = [str(kind) for kind in written] if isinstance(written, list) else [""] * total
    kept = [kind for kind in kinds if kind not in _WITHOUT_KV]
    if len(kept) < len(kinds):
        notes.append(f"{len(kinds) - len(kept)} layers keep a fixed state instead of KV, which is not counted here")
    shared = int(config.get("num_kv_shared_layers") or 0)
    if shared:
        notes.append(f"{shared} layers use the KV of another layer")
    kept = kept[: len(kept) - shared]
    if not kept:
        raise ModelError("no layer of this model keeps KV")
    return kept


def _window(config: Mapping[str, Any], kinds: list[str], notes: list[str]) -> tuple[int, int]:
    """Layers with a window, and the window in tokens."""
    window = config.get("sliding_window") or 0
    if not isinstance(window, int) or window <= 0 or config.get("use_sliding_window") is False:
        return 0, 0
    if any(kinds):
        count = sum(kind == "sliding_attention" for kind in kinds)
    elif config.get("model_type") == "gemma2":
        count = (len(kinds) + 1) // 2  # every other layer, from the first
    elif isinstance(config.get("sliding_window_pattern"), int):
        count = len(kinds) - len(kinds) // int(config["sliding_window_pattern"])
    else:
        count = len(kinds)
    if count:
        notes.append(
            f"{count} of {len(kinds)} layers look at the last {window} tokens only; blocks are kept whole, so all "
            "tokens of all layers are counted"
        )
    return (count, window) if count else (0, 0)


def _kv_dtype(config: Mapping[str, Any], notes: list[str]) -> str:
    quantisation = config.get("quantization_config")
    if isinstance(quantisation, dict):
        scheme = quantisation.get("kv_cache_scheme")
        bits = scheme.get("num_bits") if isinstance(scheme, dict) else None
        if bits == 8 or str(quantisation.get("kv_cache_quant_algo", "")).upper() == "FP8":
            notes.append("the checkpoint asks for an fp8 KV cache")
            return "float8_e4m3fn"
    return weight_dtype(config)
