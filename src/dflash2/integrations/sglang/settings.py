"""From ``dflash2_config.json`` to SGLang's server arguments, and what is refused together with it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from dflash2.config import Config, load_config
from dflash2.errors import ConfigError

VARIABLE = "DFLASH2_CONFIG"
"""Environment variable with the absolute path of the file: how ``sgl.Engine`` is told, and how processes tell each
other."""

_NOT_TOGETHER = {
    "enable_hierarchical_cache": "--enable-hierarchical-cache (HiCache)",
    "hicache_storage_backend": "--hicache-storage-backend",
    "enable_lmcache": "--enable-lmcache",
    "enable_flexkv": "--enable-flexkv",
    "enable_hisparse": "--enable-hisparse",
    "disable_radix_cache": "--disable-radix-cache",
    "radix_cache_backend": "--radix-cache-backend",
    "enable_unified_cache_external_linker": "--enable-unified-cache-external-linker",
    "speculative_algorithm": "--speculative-algorithm",
    "enable_unified_memory": "--enable-unified-memory",
    "enable_kv_cache_sharding": "--enable-kv-cache-sharding",
    "enable_page_major_kv_layout": "--enable-page-major-kv-layout",
}


def configured_path() -> str | None:
    """The file named by the environment, or None."""
    return os.environ.get(VARIABLE) or None


def read(path: str) -> Config:
    """The configuration.

    Raises:
        ConfigError: it cannot be read or is not valid.
    """
    return load_config(path)


def absolute(path: str) -> str:
    """Absolute path: children may have another current directory."""
    return str(Path(path).absolute())


def conflicts(server_args: Any) -> list[str]:
    """Switches that are on and cannot be together with DFlash2."""
    found = [flag for name, flag in _NOT_TOGETHER.items() if getattr(server_args, name, None)]
    if getattr(server_args, "disaggregation_mode", "null") != "null":
        found.append("--disaggregation-mode")
    if getattr(server_args, "pp_size", 1) > 1:
        found.append("--pp-size above 1")
    if getattr(server_args, "attn_dp_size", None) not in (None, 1) or getattr(
        server_args, "enable_dp_attention", False
    ):
        found.append("--enable-dp-attention")
    return found


def page_size(config: Config, asked: int | None) -> int:
    """Tokens per page, which is ``kv_block.block_size``.

    Args:
        config: the configuration.
        asked: ``--page-size``, None where the user left it.

    Raises:
        ConfigError: the two contradict each other.
    """
    if asked is None or asked == config.kv_block.block_size:
        return config.kv_block.block_size
    if "block_size" in config.kv_block.model_fields_set:
        raise ConfigError(
            f"{config.kv_block.block_size} tokens, but --page-size {asked} was given; a block is a page, so leave one "
            "of the two out or make them equal",
            "kv_block.block_size",
        )
    return asked
