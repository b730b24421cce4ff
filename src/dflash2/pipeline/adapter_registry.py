"""Names of adapters and what they stand for; asked by the server's threads and by the engine's."""

from __future__ import annotations

import re
import threading
from collections.abc import Collection
from pathlib import Path

from dflash2.errors import RequestError
from dflash2.pipeline.adapter_file import AdapterSpec, Targets, read_spec

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/:-]{0,127}")


class AdapterRegistry:
    """Adapters that requests may name.

    Args:
        targets: linear layers of the model.
        max_rank: largest rank.
        folder: adapters that are registered while the server runs must lie in it; None: none may be.
    """

    def __init__(self, targets: Targets, max_rank: int, folder: Path | None = None) -> None:
        self._targets = targets
        self._max_rank = max_rank
        self._folder = None if folder is None else folder.resolve()
        self._lock = threading.Lock()
        self._specs: dict[str, AdapterSpec] = {}
        self._reserved: Collection[str] = ()

    def add(self, name: str, path: Path) -> AdapterSpec:
        """Check an adapter and give it a name. Reads its files; not for the event loop.

        Raises:
            RequestError: the name is in use or no name.
            ModelError: the adapter cannot be used; says why.
        """
        self._check_name(name)
        spec = read_spec(name, path, self._targets, self._max_rank)
        with self._lock:
            self._check_name(name)  # another request may have taken it meanwhile
            self._specs[name] = spec
        return spec

    def add_from_client(self, name: str, path: str) -> AdapterSpec:
        """``add`` for somebody who must not read this machine's other files.

        Raises:
            RequestError: the path does not lie in the folder for adapters. Also what ``add`` raises.
        """
        if self._folder is None:
            raise RequestError(
                "adapters cannot be loaded while this server runs: start it with --lora-dir", param="lora_path"
            )
        if "\0" in path:
            raise RequestError("lora_path is no path", param="lora_path")
        resolved = (self._folder / path).resolve()
        if not resolved.is_relative_to(self._folder) or resolved == self._folder:
            raise RequestError("lora_path must lie in the folder for adapters (--lora-dir)", param="lora_path")
        return self.add(name, resolved)

    def remove(self, name: str) -> AdapterSpec:
        """Take the name away; requests that run keep the adapter.

        Raises:
            RequestError: there is no such adapter.
        """
        with self._lock:
            if name not in self._specs:
                raise RequestError(f"there is no adapter {name!r}", param="lora_name")
            return self._specs.pop(name)

    def reserve(self, names: Collection[str]) -> None:
        """Names that no adapter may take: those of the model.

        Raises:
            RequestError: an adapter has one of them already.
        """
        with self._lock:
            self._reserved = tuple(names)
            taken = sorted(self._specs.keys() & set(names))
        if taken:
            raise RequestError(f"adapter {taken[0]!r} has the name of the model; name one of them otherwise")

    def get(self, name: str) -> AdapterSpec | None:
        """The adapter of that name, if there is one."""
        with self._lock:
            return self._specs.get(name)

    def all(self) -> list[AdapterSpec]:
        """In the order in which they were added."""
        with self._lock:
            return list(self._specs.values())

    def _check_name(self, name: str) -> None:
        if not _NAME.fullmatch(name) or ".." in name:
            raise RequestError(
                "lora_name must begin with a letter or digit and have letters, digits and . _ / : - only",
                param="lora_name",
            )
        if name in self._specs or name in self._reserved:
            raise RequestError(f"the name {name!r} is in use; unload that adapter first", param="lora_name")
