"""DFlash2: one runtime for the memory of LLM inference."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dflash2.build import create_runtime
    from dflash2.cache.sequence import Residency, Sequence
    from dflash2.config import Config, load_config, parse_config
    from dflash2.errors import DFlash2Error
    from dflash2.runtime import Runtime
    from dflash2.table.keys import KeyNamespace
    from dflash2.types import KVLayout, Tier

__version__ = "2.0.0"

_HOME = {
    "Config": "dflash2.config",
    "DFlash2Error": "dflash2.errors",
    "KVLayout": "dflash2.types",
    "KeyNamespace": "dflash2.table.keys",
    "Residency": "dflash2.cache.sequence",
    "Runtime": "dflash2.runtime",
    "Sequence": "dflash2.cache.sequence",
    "Tier": "dflash2.types",
    "create_runtime": "dflash2.build",
    "load_config": "dflash2.config",
    "parse_config": "dflash2.config",
}

__all__ = [
    "Config",
    "DFlash2Error",
    "KVLayout",
    "KeyNamespace",
    "Residency",
    "Runtime",
    "Sequence",
    "Tier",
    "__version__",
    "create_runtime",
    "load_config",
    "parse_config",
]


def __getattr__(name: str) -> Any:
    """Import public names on first use, so that ``dflash2 --help`` does not wait for torch."""
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOME[name]), name)
