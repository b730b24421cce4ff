"""Loads a transformers decoder for the reference engine: from a directory, a .gguf file or a hub id."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PretrainedConfig, PreTrainedModel

from dflash2.engine.fingerprint import model_fingerprint
from dflash2.engine.gguf_file import GgufFile
from dflash2.engine.model_support import check_supported
from dflash2.engine.packed_linear import can_pack, pack_linear_layers
from dflash2.errors import ModelError
from dflash2.types import KVLayout

DTYPES = ("float32", "bfloat16", "float16")

_auto_model: Any = AutoModelForCausalLM
"""Parts of its interface carry no types."""


@dataclass(frozen=True)
class LoadedModel:
    """A model ready for ``ModelRunner``, and what the rest of the engine asks about it.

    Attributes:
        model: in evaluation mode, without gradients.
        source: the path or hub id it came from.
        dtype: of weights and KV, a key of ``types.DTYPE_BYTES``.
        fingerprint: identity of configuration and weights, for block keys; see ``model_fingerprint``.
    """

    model: PreTrainedModel
    source: str
    dtype: str
    fingerprint: str

    @property
    def config(self) -> PretrainedConfig:
        """The model's configuration."""
        return self.model.config

    @property
    def vocab_size(self) -> int:
        """Width of the logits."""
        return int(self.config.vocab_size)

    @property
    def max_context(self) -> int:
        """Tokens of prompt and output together that the model's positions cover."""
        return int(self.config.max_position_embeddings)

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Tokens that end an answer, from the generation configuration, else the model's; may be empty."""
        generation = getattr(self.model, "generation_config", None)
        for owner in (generation, self.config):
            value = getattr(owner, "eos_token_id", None)
            if value is not None:
                return tuple(value) if isinstance(value, list | tuple) else (int(value),)
        return ()

    def kv_layout(self, block_size: int) -> KVLayout:
        """Shape of one KV block of ``block_size`` tokens."""
        config = self.config
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        return KVLayout(config.num_hidden_layers, config.num_key_value_heads, head_dim, block_size, self.dtype)


def load_model(
    path_or_id: str | Path, dtype: str = "float32", device: str = "cpu", *, pack: bool = True
) -> LoadedModel:
    """Load a decoder.

    Args:
        path_or_id: a directory in transformers' format, a .gguf file (dequantised to ``dtype``), or a hub id. A hub id
            is looked up in the local cache only, where HF_HUB_OFFLINE is set.
        dtype: "float32", "bfloat16" or "float16". Only float32 gives the same tokens whatever the batch.
        device: a torch device.
        pack: on a CPU, keep the weights of float32 linear layers only in oneDNN's order; see ``packed_linear``.

    Raises:
        ModelError: it cannot be found or read, or is of a kind that the engine does not run, or there is no
            such device.
    """
    if dtype not in DTYPES:
        raise ModelError(f"dtype {dtype!r} is not supported, only {', '.join(DTYPES)}")
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise ModelError(f"this torch ({torch.__version__}) sees no CUDA device, so nothing can be loaded to {device}")
    source = str(path_or_id)
    torch_dtype: torch.dtype = getattr(torch, dtype)
    model = _load_gguf(Path(source), torch_dtype) if _is_gguf(source) else _load_transformers(source, torch_dtype)
    model.to(device).train(False).requires_grad_(False)
    fingerprint = model_fingerprint(model)
    if pack and can_pack(model):
        pack_linear_layers(model)
    return LoadedModel(model, source, dtype, fingerprint)


def load_tokenizer(path_or_id: str | Path) -> Any:
    """The tokenizer that belongs to ``load_model(path_or_id)``, a transformers tokenizer.

    Raises:
        ModelError: there is none, or it cannot be read.
    """
    source = str(path_or_id)
    try:
        if _is_gguf(source):
            path = Path(source)
            return AutoTokenizer.from_pretrained(str(path.parent), gguf_file=path.name)
        return AutoTokenizer.from_pretrained(source)
    except (OSError, ValueError) as error:
        raise ModelError(f"no tokenizer in {source}: {error}") from error


def _is_gguf(source: str) -> bool:
    return source.lower().endswith(".gguf")


def _load_transformers(source: str, dtype: torch.dtype) -> Any:
    try:
        check_supported(AutoConfig.from_pretrained(source))
        model, report = _auto_model.from_pretrained(
            source, dtype=dtype, attn_implementation="sdpa", output_loading_info=True
        )
    except (OSError, ValueError) as error:
        raise ModelError(f"cannot load a model from {source}: {error}") from error
    if report["missing_keys"]:
        raise ModelError(f"{source} lacks weights: {sorted(report['missing_keys'])[:5]}")
    return model


def _load_gguf(path: Path, dtype: torch.dtype) -> Any:
    if not path.is_file():
        raise ModelError(f"{path} does not exist")
    file = GgufFile(path)
    config = file.config()
    check_supported(config)
    # On the meta device nothing is initialised at random only to be overwritten.
    with torch.device("meta"):
        model = _auto_model.from_config(config, dtype=dtype, attn_implementation="sdpa")
    try:
        model.load_state_dict(file.state_dict(config, dtype), strict=True, assign=True)
    except RuntimeError as error:
        raise ModelError(f"{path} does not fit its own description: {error}") from error
    # Rotary frequencies are no weights; they are computed when the module is built.
    decoder = model.get_decoder()
    decoder.rotary_emb = type(decoder.rotary_emb)(config=config)
    return model
