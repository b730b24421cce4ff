"""Writes ``dflash2_config.json``."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dflash2.errors import StorageError


def write_config(path: Path, values: Mapping[str, Any], *, force: bool) -> None:
    """Write a configuration; an existing file is only replaced if ``force`` is set.

    Raises:
        StorageError: the file exists, or cannot be written.
    """
    try:
        with path.open("w" if force else "x", encoding="utf-8") as stream:
            stream.write(json.dumps(values, indent=2) + "\n")
    except FileExistsError as error:
        raise StorageError(f"{path} exists; --force overwrites it") from error
    except OSError as error:
        raise StorageError(f"cannot write {path}: {error.strerror or error}") from error
