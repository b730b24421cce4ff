"""LoRA adapters as peft writes them: ``adapter_config.json`` and ``adapter_model.safetensors``, checked before use.

Only what the engine computes is accepted: plain LoRA on linear layers of the decoder. Whatever would change the answer
and is not computed is refused by name.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from dflash2.errors import ModelError
from dflash2.types import MIB

CONFIG_NAME = "adapter_config.json"
WEIGHTS_NAME = "adapter_model.safetensors"
MAX_CONFIG_BYTES = 1 * MIB
MAX_HEADER_BYTES = 16 * MIB
ITEM_BYTES = {"F32": 4, "F16": 2, "BF16": 2}
_TENSOR_NAME = re.compile(r"base_model\.model\.(?P<module>.+)\.lora_(?P<side>[AB])(\.default)?\.weight")
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "alora_invocation_tokens": (None,),
    "arrow_config": (None,),
    "bias": (None, "none"),
    "fan_in_fan_out": (None, False),
    "layer_replication": (None,),
    "lora_bias": (None, False),
    "modules_to_save": (None, []),
    "target_parameters": (None, []),
    "trainable_token_indices": (None, [], {}),
    "use_bdlora": (None, False),
    "use_dora": (None, False),
    "use_qalora": (None, False),
}
"""Fields that change what an adapter computes, with the values at which they do not."""

Array = npt.NDArray[Any]
Targets = Mapping[str, tuple[int, int]]
"""Linear layers that may have an adapter, by name: features in and out."""


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """The adapter of one linear layer.

    Attributes:
        rank: rows of A, columns of B.
        scale: factor of ``B @ A``.
        a, b: places of the two tensors.
    """

    rank: int
    scale: float
    a: TensorSpec
    b: TensorSpec


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Where a tensor is in the file: ``dtype`` as safetensors names it, bytes from ``start`` on."""

    dtype: str
    shape: tuple[int, int]
    start: int


@dataclass(frozen=True, slots=True, eq=False)
class AdapterSpec:
    """An adapter that has been checked; its weights are still on disk.

    Attributes:
        name: as requests name it.
        path: resolved folder.
        digest: identity of weights and settings, 64 hexadecimal digits; part of every block key.
        layers: by the name of the linear layer.
        num_bytes: of all weights.
        file_bytes: of the file that has them.
    """

    name: str
    path: Path
    digest: str
    layers: Mapping[str, LayerSpec]
    num_bytes: int
    file_bytes: int

    @property
    def rank(self) -> int:
        """The largest of its layers."""
        return max(layer.rank for layer in self.layers.values())


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """``a`` is ``[rank, in]``, ``b`` is ``[out, rank]``; bfloat16 as uint16."""

    a: Array
    b: Array
    scale: float


AdapterWeights = Mapping[str, LayerWeights]


def read_spec(name: str, path: Path, targets: Targets, max_rank: int) -> AdapterSpec:
    """Check an adapter against the model. Reads the whole file once, for its digest.

    Raises:
        ModelError: says what is wrong and what is allowed.
    """
    folder = path.resolve()
    settings = _read_settings(folder)
    _check_settings(settings)
    weights = folder / WEIGHTS_NAME
    try:
        size = weights.stat().st_size
        most = _most_bytes(targets, max_rank)
        if size > most:
            raise ModelError(f"{weights} has {size} bytes; an adapter of rank {max_rank} has at most {most} here")
        with weights.open("rb") as file:
            header, data_start = _read_header(file, weights, size)
            file.seek(0)
            digest = _digest(iter(lambda: file.read(4 * MIB), b""), settings)
    except OSError as error:
        raise ModelError(f"cannot read {weights}: {error.strerror or error}; peft writes it") from error
    layers = _layers(header, data_start, size, settings, targets, max_rank)
    num_bytes = sum(_num_bytes(t) for layer in layers.values() for t in (layer.a, layer.b))
    return AdapterSpec(name, folder, digest, layers, num_bytes, size)


def read_weights(spec: AdapterSpec) -> AdapterWeights:
    """The weights, from disk, if they are still the ones that were checked.

    In one piece, so that what is used is what was checked, and the model's thread gets the interpreter meanwhile.

    Raises:
        ModelError: the files changed since, or cannot be read.
    """
    path = spec.path / WEIGHTS_NAME
    try:
        data = np.empty(spec.file_bytes + 1, np.uint8)  # one more, to see that it has not grown
        with path.open("rb") as file:
            data = data[: file.readinto(data.data)]
        if len(data) != spec.file_bytes or _digest([data.data], _read_settings(spec.path)) != spec.digest:
            raise ModelError(f"adapter {spec.name}: the files in {spec.path} changed since it was loaded; load it anew")
    except OSError as error:
        raise ModelError(f"adapter {spec.name}: cannot read {path}: {error.strerror or error}") from error
    return {
        name: LayerWeights(_matrix(data, layer.a), _matrix(data, layer.b), layer.scale)
        for name, layer in spec.layers.items()
    }


def _read_settings(folder: Path) -> dict[str, Any]:
    path = folder / CONFIG_NAME
    try:
        if path.stat().st_size > MAX_CONFIG_BYTES:
            raise ModelError(f"{path} is larger than any adapter's configuration")
        settings = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ModelError(f"cannot read {path}: {error.strerror or error}; peft writes it") from error
    except ValueError as error:
        raise ModelError(f"{path} is no JSON: {error}") from error
    if not isinstance(settings, dict):
        raise ModelError(f"{path} must hold a JSON object")
    return settings


def _check_settings(settings: dict[str, Any]) -> None:
    if settings.get("peft_type") != "LORA":
        raise ModelError(f"peft_type {settings.get('peft_type')!r} is not supported, only 'LORA'")
    if settings.get("task_type") not in (None, "CAUSAL_LM"):
        raise ModelError(f"task_type {settings['task_type']!r} is not supported, only 'CAUSAL_LM'")
    for field, neutral in _NEUTRAL.items():
        if settings.get(field) not in neutral:
            raise ModelError(f"the adapter's {field} = {settings[field]!r} is not supported: plain LoRA only")
    for field in ("r", "lora_alpha"):
        value = settings.get(field)
        if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0 or not math.isfinite(value):
            raise ModelError(f"the adapter's {field} must be a positive number, not {value!r}")
    for field in ("rank_pattern", "alpha_pattern"):
        if not isinstance(settings.get(field) or {}, dict):
            raise ModelError(f"the adapter's {field} must be an object")


def _read_header(file: BinaryIO, path: Path, size: int) -> tuple[dict[str, Any], int]:
    """The table of tensors at the beginning of a safetensors file, and where the data begin."""
    length = int.from_bytes(file.read(8), "little")
    if not 0 < length <= min(MAX_HEADER_BYTES, size - 8):
        raise ModelError(f"{path} is no safetensors file")
    try:
        header = json.loads(file.read(length))
    except ValueError as error:
        raise ModelError(f"{path} is no safetensors file: {error}") from error
    if not isinstance(header, dict):
        raise ModelError(f"{path} is no safetensors file")
    header.pop("__metadata__", None)
    return header, 8 + length


def _digest(pieces: Iterable[bytes | memoryview], settings: dict[str, Any]) -> str:
    """Over the whole file and every setting that takes part in the product."""
    state = hashlib.blake2b(digest_size=32, person=b"dflash2-adapter")
    used = {key: settings.get(key) for key in ("r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern")}
    text = json.dumps(used, sort_keys=True).encode()
    state.update(len(text).to_bytes(8, "little") + text)
    for piece in pieces:
        state.update(piece)
    return state.hexdigest()


def _layers(
    header: dict[str, Any], data_start: int, size: int, settings: dict[str, Any], targets: Targets, max_rank: int
) -> dict[str, LayerSpec]:
    sides: dict[str, dict[str, TensorSpec]] = {}
    for name, entry in header.items():
        match = _TENSOR_NAME.fullmatch(name)
        if match is None:
            raise ModelError(f"tensor {name} is no LoRA matrix of a linear layer")
        sides.setdefault(match["module"], {})[match["side"]] = _tensor(name, entry, data_start, size)
    if not sides:
        raise ModelError("the adapter has no weights")
    return {module: _layer(module, pair, settings, targets, max_rank) for module, pair in sides.items()}


def _layer(
    module: str, pair: dict[str, TensorSpec], settings: dict[str, Any], targets: Targets, max_rank: int
) -> LayerSpec:
    if module not in targets:
        kinds = sorted({name.rpartition(".")[2] for name in targets})
        raise ModelError(
            f"this model has no layer {module} that can be adapted; it has {', '.join(kinds)} in each block"
        )
    if pair.keys() != {"A", "B"}:
        raise ModelError(f"{module} has only one of lora_A and lora_B")
    a, b = pair["A"], pair["B"]
    rank, (num_in, num_out) = a.shape[0], targets[module]
    if a.shape != (rank, num_in) or b.shape != (num_out, rank):
        raise ModelError(
            f"{module}: A is {list(a.shape)} and B {list(b.shape)}, but the layer has {num_in} features in and "
            f"{num_out} out: the adapter belongs to another model"
        )
    told = _by_pattern(settings.get("rank_pattern"), module, settings["r"])
    if rank != told:
        raise ModelError(f"{module} has rank {rank}, and the adapter's configuration says {told}")
    if rank > max_rank:
        raise ModelError(f"{module} has rank {rank}; this server takes up to {max_rank} (lora.max_rank)")
    alpha = _by_pattern(settings.get("alpha_pattern"), module, settings["lora_alpha"])
    return LayerSpec(rank, alpha / math.sqrt(rank) if settings.get("use_rslora") else alpha / rank, a, b)


def _tensor(name: str, entry: Any, data_start: int, size: int) -> TensorSpec:
    try:
        dtype, (rows, columns), (start, end) = entry["dtype"], entry["shape"], entry["data_offsets"]
        if dtype not in ITEM_BYTES:
            raise ModelError(f"tensor {name} has dtype {dtype}; supported are {', '.join(ITEM_BYTES)}")
        fits = rows > 0 and columns > 0 and 0 <= start <= end <= size - data_start
        if not fits or end - start != rows * columns * ITEM_BYTES[dtype]:
            raise ModelError(f"tensor {name} does not lie within the file: it is damaged")
    except (KeyError, TypeError, ValueError) as error:
        raise ModelError(f"tensor {name} is not described as a matrix: {error}") from error
    return TensorSpec(dtype, (rows, columns), data_start + start)


def _by_pattern(patterns: Mapping[str, Any] | None, module: str, default: Any) -> Any:
    """As peft matches them: the end of the name, from a dot on."""
    for pattern, value in (patterns or {}).items():
        try:
            if re.match(rf"(.*\.)?({pattern})$", module):
                return value
        except re.error as error:
            raise ModelError(f"pattern {pattern!r} of the adapter is no regular expression: {error}") from error
    return default


def _matrix(data: Array, tensor: TensorSpec) -> Array:
    """A view of it."""
    dtype = {"F32": np.float32, "F16": np.float16, "BF16": np.uint16}[tensor.dtype]
    return data[tensor.start : tensor.start + _num_bytes(tensor)].view(dtype).reshape(tensor.shape)


def _num_bytes(tensor: TensorSpec) -> int:
    return tensor.shape[0] * tensor.shape[1] * ITEM_BYTES[tensor.dtype]


def _most_bytes(targets: Targets, max_rank: int) -> int:
    numbers = sum(max_rank * (num_in + num_out) for num_in, num_out in targets.values())
    return numbers * max(ITEM_BYTES.values()) + MAX_HEADER_BYTES
