"""The identity of a model's weights, which every block key contains."""

from __future__ import annotations

import hashlib
import json

import torch
from transformers import PretrainedConfig, PreTrainedModel

_PIECE_BYTES = 16 * 1024
_PIECES = 64
_NO_INFLUENCE_ON_KV = ("_name_or_path", "transformers_version", "architectures", "use_cache")


def model_fingerprint(model: PreTrainedModel) -> str:
    """Hash of the configuration and of a sample of every weight tensor; equal across processes and devices.

    A tensor up to 1 MiB enters whole, a larger one with 64 evenly spread pieces of 16 KiB: about 1 MiB a tensor, a
    second for the largest models. Training or merging an adapter changes a tensor throughout, so it is seen; a few
    hand-edited values inside a large tensor may not be.

    Returns:
        64 hexadecimal digits (BLAKE2b-256).
    """
    digest = hashlib.blake2b(digest_size=32, person=b"dflash2-model")
    _add(digest, json.dumps(_relevant(model.config), sort_keys=True, default=str).encode())
    for name, tensor in sorted(model.state_dict().items()):
        _add(digest, f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
        _add(digest, _sample(tensor))
    return digest.hexdigest()


def _relevant(config: PretrainedConfig) -> dict[str, object]:
    return {key: value for key, value in config.to_dict().items() if key not in _NO_INFLUENCE_ON_KV}


def _add(digest: hashlib.blake2b, field: bytes) -> None:
    digest.update(len(field).to_bytes(8, "little"))
    digest.update(field)


def _sample(tensor: torch.Tensor) -> bytes:
    raw = tensor.detach().reshape(-1).view(torch.uint8)
    if raw.numel() > _PIECES * _PIECE_BYTES:
        last_start = raw.numel() - _PIECE_BYTES
        starts = (last_start * i // (_PIECES - 1) for i in range(_PIECES))
        raw = torch.cat([raw[start : start + _PIECE_BYTES] for start in starts])
    return raw.cpu().numpy().tobytes()
