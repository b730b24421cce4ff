"""Reads GGUF files of the Llama family: metadata to a transformers configuration, tensors to its parameter names.

transformers can do this itself, but parses the file in Python several times, which takes most of its time, and
passes over metadata it does not know. Here, what is not known is refused. Format: ggml's ``docs/gguf.md``, versions 2
and 3.
"""

from __future__ import annotations

import mmap
import struct
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoConfig, PretrainedConfig

from dflash2.errors import ModelError

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_DEFAULT_ALIGNMENT = 32

_ARCHITECTURES = ("llama", "qwen2", "qwen3")
"""GGUF architectures; Mistral models are stored as llama."""

_CONFIG_KEYS = {
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "block_count": "num_hidden_layers",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "attention.key_length": "head_dim",
    "context_length": "max_position_embeddings",
}
_REQUIRED_KEYS = _CONFIG_KEYS.keys() - {"attention.head_count_kv", "attention.key_length"}
_OTHER_KEYS = {"rope.freq_base", "rope.dimension_count", "rope.scaling.type", "attention.value_length", "vocab_size"}
"""Handled by themselves in ``config``. Any further key of the architecture may change the arithmetic and is refused."""

_MODULES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One tensor: shape in row-major order, ggml's type number, offset from the start of the file in bytes."""

    name: str
    shape: tuple[int, ...]
    type: int
    offset: int


class _Cursor:
    """Reads little-endian values one after the other."""

    def __init__(self, data: mmap.mmap) -> None:
        self._data = data
        self.offset = 0

    def scalar(self, code: str) -> Any:
        fmt = struct.Struct("<" + code)
        (value,) = fmt.unpack_from(self._data, self.offset)
        self.offset += fmt.size
        return value

    def string(self) -> str:
        length = self.scalar("Q")
        raw = self._data[self.offset : self.offset + length]
        self.offset += length
        return raw.decode("utf-8", errors="replace")

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY:
            element, count = self.scalar("I"), self.scalar("Q")
            return [self.value(element) for _ in range(count)]
        return self.scalar(_SCALARS[kind])


class GgufFile:
    """One GGUF file.

    Args:
        path: the file.

    Raises:
        ModelError: not a GGUF file of a version that can be read, or damaged.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with path.open("rb") as file:
                data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            self._bytes = np.frombuffer(data, dtype=np.uint8)
            self._read_header(_Cursor(data))
        except (OSError, ValueError, struct.error, KeyError) as error:
            raise ModelError(f"{path}: the GGUF header is damaged ({error})") from error

    def _read_header(self, cursor: _Cursor) -> None:
        magic, version = cursor.scalar("4s"), cursor.scalar("I")
        if magic != b"GGUF" or version not in (2, 3):
            raise ModelError(f"{self.path}: not a GGUF file of version 2 or 3")
        num_tensors, num_values = cursor.scalar("Q"), cursor.scalar("Q")
        self.metadata: dict[str, Any] = {}
        for _ in range(num_values):
            key = cursor.string()
            self.metadata[key] = cursor.value(cursor.scalar("I"))
        infos = []
        for _ in range(num_tensors):
            name = cursor.string()
            dims = [cursor.scalar("Q") for _ in range(cursor.scalar("I"))]
            infos.append(TensorInfo(name, tuple(reversed(dims)), cursor.scalar("I"), cursor.scalar("Q")))
        alignment = self.metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
        base = -(-cursor.offset // alignment) * alignment
        self.tensors = {t.name: TensorInfo(t.name, t.shape, t.type, base + t.offset) for t in infos}

    def config(self) -> PretrainedConfig:
        """The transformers configuration.

        Raises:
            ModelError: another architecture, or metadata that this reader does not know how to honour.
        """
        arch = self.metadata.get("general.architecture")
        if arch not in _ARCHITECTURES:
            raise ModelError(f"{self.path}: GGUF architecture {arch!r} is not supported, only {list(_ARCHITECTURES)}")
        values, fields = self._settings(arch)
        for name in ("bos", "eos"):
            fields[f"{name}_token_id"] = self.metadata.get(f"tokenizer.ggml.{name}_token_id")
        if arch == "llama":
            fields["attention_bias"] = "blk.0.attn_q.bias" in self.tensors
        return AutoConfig.for_model(
            arch,
            **fields,
            vocab_size=self.tensors["token_embd.weight"].shape[0],
            tie_word_embeddings="output.weight" not in self.tensors,
            rope_parameters={"rope_type": "default", "rope_theta": values.get("rope.freq_base", 10000.0)},
        )

    def _settings(self, arch: str) -> tuple[dict[str, Any], dict[str, Any]]:
        """The architecture's metadata, and the part of it under transformers' names."""
        values = {k.removeprefix(f"{arch}."): v for k, v in self.metadata.items() if k.startswith(f"{arch}.")}
        unknown = sorted(values.keys() - _CONFIG_KEYS.keys() - _OTHER_KEYS)
        if unknown:
            raise ModelError(f"{self.path}: GGUF settings {unknown} of {arch} are not supported")
        if values.get("rope.scaling.type", "none") != "none":
            raise ModelError(f"{self.path}: GGUF position scaling {values['rope.scaling.type']!r} is not supported")
        fields = {name: values[key] for key, name in _CONFIG_KEYS.items() if key in values}
        lacking = sorted(key for key in _REQUIRED_KEYS if _CONFIG_KEYS[key] not in fields)
        if lacking or "token_embd.weight" not in self.tensors:
            raise ModelError(f"{self.path}: GGUF metadata lacks {lacking or 'the token embedding'}")
        head_dim = fields.setdefault("head_dim", fields["hidden_size"] // fields["num_attention_heads"])
        for key in ("rope.dimension_count", "attention.value_length"):
            if values.get(key, head_dim) != head_dim:
                raise ModelError(f"{self.path}: GGUF {key} {values[key]} differs from the head size {head_dim}")
        return values, fields

    def state_dict(self, config: PretrainedConfig, dtype: torch.dtype) -> dict[str, torch.Tensor]:
        """All parameters under transformers' names, dequantised.

        Raises:
            ModelError: a tensor that no parameter takes, or a type that cannot be dequantised.
        """
        heads = {".attn_q.": config.num_attention_heads, ".attn_k.": config.num_key_value_heads}
        state = {}
        for info in self.tensors.values():
            tensor = self._dequantize(info).to(dtype)
            if self.metadata["general.architecture"] == "llama":
                tensor = next((_unpermute(tensor, n) for part, n in heads.items() if part in info.name), tensor)
            state[self._parameter_name(info.name)] = tensor
        if config.tie_word_embeddings:
            state["lm_head.weight"] = state["model.embed_tokens.weight"]
        return state

    def _parameter_name(self, name: str) -> str:
        module, _, suffix = name.rpartition(".")
        prefix = ""
        if module.startswith("blk."):
            _, layer, module = module.split(".", 2)
            prefix = f"model.layers.{layer}."
        if module not in _MODULES:
            raise ModelError(f"{self.path}: GGUF tensor {name!r} is not supported")
        return f"{prefix}{_MODULES[module]}.{suffix}"

    def _dequantize(self, info: TensorInfo) -> torch.Tensor:
        from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
        from gguf.quants import dequantize

        if info.type not in set(GGMLQuantizationType):
            raise ModelError(f"{self.path}: tensor {info.name!r} has the unknown type {info.type}")
        kind = GGMLQuantizationType(info.type)
        per_block, block_bytes = GGML_QUANT_SIZES[kind]
        num_bytes = prod(info.shape) // per_block * block_bytes
        raw = self._bytes[info.offset : info.offset + num_bytes]
        if raw.size != num_bytes:
            raise ModelError(f"{self.path}: truncated in tensor {info.name!r}")
        try:
            values = dequantize(raw.reshape(*info.shape[:-1], -1), kind)
        except NotImplementedError as error:
            raise ModelError(
                f"{self.path}: tensor {info.name!r} has type {kind.name}, which is not supported"
            ) from error
        return torch.from_numpy(np.array(values, dtype=np.float32))


def _unpermute(weight: torch.Tensor, num_heads: int) -> torch.Tensor:
    """llama.cpp interleaves the halves of each head for its rotary embedding; transformers wants them apart."""
    pairs = weight.reshape(num_heads, -1, 2, *weight.shape[1:])
    return pairs.transpose(1, 2).reshape(weight.shape).contiguous()
