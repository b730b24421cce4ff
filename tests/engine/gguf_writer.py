"""Writes small GGUF files for tests, with the gguf package's own writer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGUFWriter

_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def write_gguf(
    path: Path, model: Any, extra: dict[str, Any] | None = None, tensors: dict[str, Any] | None = None
) -> None:
    """Store ``model`` in float32, with ``extra`` metadata of the architecture and ``tensors`` besides its own."""
    config = model.config
    arch = config.model_type
    writer = GGUFWriter(path, arch)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_key_length(config.head_dim)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_eos_token_id(5)
    for key, value in (extra or {}).items():
        add = writer.add_string if isinstance(value, str) else writer.add_uint32
        add(f"{arch}.{key}", value)
    for name, values in {**_stored(model), **(tensors or {})}.items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _stored(model: Any) -> dict[str, np.ndarray]:
    heads = {"q_proj": model.config.num_attention_heads, "k_proj": model.config.num_key_value_heads}
    stored = {}
    for name, tensor in model.state_dict().items():
        values = tensor.float().numpy()
        projection = next((p for p in heads if p in name), None)
        if model.config.model_type == "llama" and projection is not None:
            values = _interleave(values, heads[projection])
        module, _, suffix = name.rpartition(".")
        prefix = ""
        if module.startswith("model.layers."):
            _, _, layer, module = module.split(".", 3)
            prefix = f"blk.{layer}."
        stored[f"{prefix}{_NAMES[module]}.{suffix}"] = np.ascontiguousarray(values)
    return stored


def _interleave(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """llama.cpp's order within a head: 0, d/2, 1, d/2 + 1, and so on."""
    return weight.reshape(num_heads, 2, -1, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape)
