"""Which transformers models the reference engine can run, and why not the others."""

from __future__ import annotations

from transformers import PretrainedConfig

from dflash2.errors import ModelError

SUPPORTED_MODEL_TYPES = ("llama", "mistral", "qwen2", "qwen3")
"""The types whose paged run is tested to equal the plain one."""

_LENGTH_DEPENDENT_ROPE = ("dynamic", "longrope")


def check_supported(config: PretrainedConfig) -> None:
    """Accept a model whose KV can live in uniform blocks, or say what stands against it.

    Raises:
        ModelError: names the feature and why paged KV blocks do not cover it.
    """
    reason = _structural_obstacle(config) or _attention_obstacle(config) or _weights_obstacle(config)
    if reason is None and config.model_type not in SUPPORTED_MODEL_TYPES:
        reason = f"paged attention has not been tested with it; supported are {', '.join(SUPPORTED_MODEL_TYPES)}"
    if reason is not None:
        raise ModelError(f"model type {config.model_type!r} is not supported: {reason}")


def _structural_obstacle(config: PretrainedConfig) -> str | None:
    if config.is_encoder_decoder:
        return "it is an encoder-decoder, and only decoders are run"
    parts = [name for name in ("vision_config", "audio_config", "text_config") if getattr(config, name, None)]
    if parts:
        return f"it has {', '.join(parts)}, and only plain text decoders are run"
    if getattr(config, "kv_lora_rank", None):
        return "multi-head latent attention (kv_lora_rank) caches a compressed state, not K and V per head"
    return None


def _attention_obstacle(config: PretrainedConfig) -> str | None:
    other_layers = sorted(set(getattr(config, "layer_types", None) or ()) - {"full_attention"})
    if other_layers:
        return f"it has {', '.join(other_layers)} layers, and every layer must attend to the whole context"
    window = getattr(config, "sliding_window", None)
    if window and getattr(config, "use_sliding_window", True) and window < config.max_position_embeddings:
        return f"attention slides over {window} tokens, and every layer must attend to the whole context"
    if getattr(config, "attn_logit_softcapping", None):
        return "attention scores are soft-capped (attn_logit_softcapping), which the attention kernel does not do"
    if config.model_type == "gpt_oss":
        return "attention sinks are not supported by the attention kernel"
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type") in _LENGTH_DEPENDENT_ROPE:
        return (
            f"position scaling {rope['rope_type']!r} follows the longest sequence of a batch, so cached K would "
            "depend on what it was computed together with"
        )
    return None


def _weights_obstacle(config: PretrainedConfig) -> str | None:
    if getattr(config, "quantization_config", None):
        return "its weights are quantised (quantization_config); load an unquantised copy, or a .gguf file"
    return None
