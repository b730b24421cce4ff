"""What the first generation left behind: its environment variables and its shared memory, and what replaces them.

Two variables are known by name. Others are matched by the words in their names, and every message says so: the name
``DFLASH_*`` is also used by speculative-decoding drafters, which have nothing to do with this project.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from dflash2.config.schema import Config
from dflash2.types import MIB

PREFIX = "DFLASH_"
SHARED_MEMORY = "/dev/shm/dflash"

_KNOWN = {"DFLASH_OFFLOAD_ENABLE": "enable", "DFLASH_DRAM_LIMIT": "memory.dram_capacity_mb"}
_AMOUNT = frozenset({"LIMIT", "SIZE", "CAPACITY", "MB", "GB", "MAX"})
_DISK = frozenset({"NVME", "SSD", "DISK"})
_BY_WORDS: tuple[tuple[tuple[frozenset[str], ...], str], ...] = (
    ((_DISK, frozenset({"PATH", "DIR", "FILE"})), "memory.nvme_path"),
    ((_DISK, _AMOUNT), "memory.nvme_capacity_mb"),
    ((frozenset({"STAGING"}), _AMOUNT), "memory.staging_buffer_size_mb"),
    ((frozenset({"DRAM", "CPU", "HOST"}), _AMOUNT), "memory.dram_capacity_mb"),
    ((frozenset({"HBM", "GPU"}), frozenset({"RESERVE", "RESERVED"})), "memory.hbm_reserve_mb"),
    ((frozenset({"BLOCK"}), frozenset({"SIZE"})), "kv_block.block_size"),
    ((frozenset({"PREFETCH"}),), "kv_block.prefetch_window"),
    ((frozenset({"THRESHOLD"}),), "policy.cold_threshold"),
    ((frozenset({"SWAP"}), frozenset({"BATCH"})), "policy.swap_batch_size"),
)
"""One word of every set must be in the variable's name; the first row that fits counts."""

_TRUE = ("1", "true", "yes", "on")
_FALSE = ("", "0", "false", "no", "off")
_QUANTITY = re.compile(r"(\d+(?:\.\d+)?)\s*(?:([KMGT])(i?B)?)?", re.IGNORECASE)
_LARGEST_GIB = 1024
_SMALLEST_BYTES = 1 << 30


@dataclass(frozen=True, slots=True)
class OldVariable:
    """An environment variable of the first generation.

    Attributes:
        name: the variable.
        value: as set.
        key: the configuration key that replaces it; None where there is none.
        certain: False if ``key`` was told from the words in the name.
    """

    name: str
    value: str
    key: str | None
    certain: bool


@dataclass(frozen=True, slots=True)
class Migration:
    """A configuration made from old variables.

    Attributes:
        document: what the file is to hold; valid for ``parse_config``.
        notes: one line per variable: what became of it and what was assumed.
    """

    document: dict[str, Any]
    notes: list[str]


def old_variables(environ: Mapping[str, str]) -> list[OldVariable]:
    """Every ``DFLASH_*`` variable, by name. ``DFLASH2_*`` are this generation's own."""
    return [_old_variable(name, environ[name]) for name in sorted(environ) if name.startswith(PREFIX)]


def first_generation_leftovers(environ: Mapping[str, str], root: Path = Path("/")) -> list[str]:
    """Warnings for the start of a server.

    Args:
        environ: the process's environment.
        root: where ``dev/shm`` is looked for.

    Returns:
        One line per leftover; empty where there is none.
    """
    lines = [describe_variable(variable) for variable in old_variables(environ)]
    if has_shared_memory(root):
        lines.append(
            f"{SHARED_MEMORY} is left over from the first generation and no longer used; it holds memory until it is "
            "removed, which is safe once no process of that generation runs"
        )
    return lines


def has_shared_memory(root: Path = Path("/")) -> bool:
    """Whether the first generation's shared memory is there."""
    return (root / SHARED_MEMORY.lstrip("/")).exists()


def describe_variable(variable: OldVariable) -> str:
    """One line: the variable no longer acts, and which key replaces it."""
    if variable.key is None:
        return (
            f"{variable.name} is not read by DFlash2 and no key replaces it; unset it, unless it belongs to a "
            "speculative-decoding drafter of a similar name"
        )
    by = "" if variable.certain else " (told from its name)"
    return f"{variable.name} no longer acts; {variable.key} in dflash2_config.json replaces it{by}"


def migrate(environ: Mapping[str, str]) -> Migration:
    """Make a configuration from the first generation's variables.

    A size with a unit is taken at its word: GB is 10^9 bytes; G and GiB are 2^30. A bare number is taken as GiB below
    1024, as bytes from 2^30 on, and as MiB between. What cannot be understood is left out, and the notes say so.
    """
    document: dict[str, Any] = {"enable": False}
    notes: list[str] = []
    seen: dict[str, str] = {}
    for variable in sorted(old_variables(environ), key=lambda v: not v.certain):
        notes.append(_migrate_one(variable, document, seen))
    if "enable" not in seen:
        notes.append("DFLASH_OFFLOAD_ENABLE is not set, so enable is false: set it to true to switch DFlash2 on")
    notes.append('the first generation evicted by plain LRU; policy.eviction "lru" keeps that, the default is "heat"')
    return Migration(document, notes)


def _old_variable(name: str, value: str) -> OldVariable:
    if name in _KNOWN:
        return OldVariable(name, value, _KNOWN[name], certain=True)
    words = set(name.removeprefix(PREFIX).split("_"))
    key = next((key for sets, key in _BY_WORDS if all(words & wanted for wanted in sets)), None)
    return OldVariable(name, value, key, certain=False)


def _migrate_one(variable: OldVariable, document: dict[str, Any], seen: dict[str, str]) -> str:
    shown = f"{variable.name}={variable.value}"
    if variable.key is None:
        return f"{shown}: no key replaces it; left out"
    if variable.key in seen:
        return f"{shown}: left out, {variable.key} comes from {seen[variable.key]}"
    value, how = _converted(variable)
    if value is None or not _is_valid(variable.key, value):
        return f"{shown}: not a value that {variable.key} can take; left out"
    seen[variable.key] = variable.name
    _put(document, variable.key, value)
    told = "" if variable.certain else ", told from the variable's name: check it"
    return f"{shown}: {variable.key} = {str(value).lower() if isinstance(value, bool) else value}{how}{told}"


def _converted(variable: OldVariable) -> tuple[object | None, str]:
    """The value as the key wants it and how it was read; None where it cannot be understood."""
    text = variable.value.strip()
    key = variable.key or ""
    if key == "enable":
        known = text.lower() in _TRUE + _FALSE
        return (text.lower() in _TRUE if known else None), ""
    if key.endswith("_mb"):
        return _mebibytes(text, variable.name)
    if key == "memory.nvme_path":
        return text, ""
    try:
        return (float(text) if key == "policy.cold_threshold" else int(text)), ""
    except ValueError:
        return None, ""


def _mebibytes(text: str, name: str) -> tuple[int | None, str]:
    match = _QUANTITY.fullmatch(text)
    if match is None:
        return None, ""
    amount, prefix, suffix = float(match[1]), (match[2] or "").upper(), match[3] or ""
    if prefix:
        base = 1000 if suffix.lower() == "b" else 1024
        return int(amount * base ** " KMGT".index(prefix) / MIB), ""
    last_word = name.rpartition("_")[2]
    if last_word in ("MB", "GB"):
        return int(
            amount * (1024 if last_word == "GB" else 1)
        ), f" (the name says {last_word}, read as {last_word[0]}iB)"
    if amount < 1:
        return None, ""
    if amount < _LARGEST_GIB:
        return int(amount * 1024), " (a bare number below 1024 is taken as GiB)"
    if amount < _SMALLEST_BYTES:
        return int(amount), " (a bare number from 1024 on is taken as MiB)"
    return int(amount / MIB), " (a bare number this large is taken as bytes)"


def _is_valid(key: str, value: object) -> bool:
    document: dict[str, Any] = {}
    _put(document, key, value)
    try:
        Config.model_validate(document)
    except ValidationError:
        return False
    return True


def _put(document: dict[str, Any], key: str, value: object) -> None:
    section, _, name = key.rpartition(".")
    (document.setdefault(section, {}) if section else document)[name] = value
