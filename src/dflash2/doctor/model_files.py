"""Finds a model's ``config.json`` and the size of its weights on this machine; nothing is downloaded.

Source: ``huggingface_hub`` documentation, "Understand caching" (``models--ORG--NAME/refs`` and ``snapshots``).
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dflash2.errors import ModelError

_MODEL_ID = re.compile(r"[\w.-]+(?:/[\w.-]+)?")
_INDEX = "model.safetensors.index.json"


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """A model on this machine.

    Attributes:
        config: the content of ``config.json``.
        path: where it was found.
        weight_bytes: of the weight files beside it; None if they are not there.
    """

    config: Mapping[str, Any]
    path: Path
    weight_bytes: int | None


def find_model(name: str, environ: Mapping[str, str]) -> ModelFiles:
    """Find a model.

    Args:
        name: a ``config.json``, a folder that holds one, or a model id that is in the local Hugging Face cache.
        environ: says where that cache is.

    Raises:
        ModelError: it is not there, or not such a file.
    """
    path = Path(name)
    if path.is_dir():
        path = path / "config.json"
    elif not path.is_file():
        path = _cached(name, environ)
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"cannot read {path}: {error}") from error
    if not isinstance(config, dict):
        raise ModelError(f"{path} is not a model's configuration: it holds no JSON object")
    return ModelFiles(config, path, _weight_bytes(path.parent))


def _cached(name: str, environ: Mapping[str, str]) -> Path:
    folder = _cache_folder(environ) / f"models--{name.replace('/', '--')}"
    if not _MODEL_ID.fullmatch(name) or not folder.is_dir():
        raise ModelError(
            f"{name} is neither a file or folder nor a model in the local Hugging Face cache ({folder.parent}); "
            "download it first, or name its config.json"
        )
    main = folder / "refs/main"
    revision = main.read_text(encoding="utf-8").strip() if main.is_file() else ""
    found = sorted(folder.glob("snapshots/*/config.json"))
    chosen = next((path for path in found if path.parent.name == revision), found[-1] if found else None)
    if chosen is None:
        raise ModelError(f"{folder} holds no config.json; download the model again")
    return chosen


def _cache_folder(environ: Mapping[str, str]) -> Path:
    if environ.get("HF_HUB_CACHE"):
        return Path(environ["HF_HUB_CACHE"])
    home = environ.get("HF_HOME") or f"{environ.get('XDG_CACHE_HOME') or '~/.cache'}/huggingface"
    return Path(home.replace("~", environ.get("HOME", "~"), 1)).expanduser() / "hub"


def _weight_bytes(folder: Path) -> int | None:
    """What the index says, or the sum of the files; an index without files still says how large they are."""
    index = folder / _INDEX
    if index.is_file():
        try:
            total = json.loads(index.read_text(encoding="utf-8"))["metadata"]["total_size"]
        except (ValueError, KeyError, TypeError) as error:
            raise ModelError(f"{index} has no metadata.total_size: {error}") from error
        return int(total)
    return sum(file.stat().st_size for file in folder.glob("*.safetensors")) or None
