"""block_key: what makes two blocks the same. BLAKE2b over tagged, length-prefixed fields (invariant 9)."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, fields

from dflash2.types import KEY_BYTES, IntArray

LAYOUT_VERSION = 1
"""Raise it when the byte order inside a block changes: older blocks then no longer match."""


KeyChain = Callable[[bytes, IntArray, int], list[bytes]]
"""As ``chain``: parent key, tokens and block size to the keys of the full blocks."""


def _digest(*parts: tuple[str, bytes | None]) -> bytes:
    """Hash of tagged fields. None and empty bytes differ, and no two splits of the same bytes collide."""
    state = hashlib.blake2b(digest_size=KEY_BYTES)
    for tag, value in parts:
        name = tag.encode()
        state.update(len(name).to_bytes(4, "little") + name)
        state.update(b"\0" if value is None else b"\1" + len(value).to_bytes(8, "little") + value)
    return state.digest()


@dataclass(frozen=True, slots=True)
class KeyNamespace:
    """Everything outside the tokens that KV depends on, for one runtime.

    Two runtimes that differ in any field never share a key.
    """

    model: str
    weights_version: str
    dtype: str
    block_size: int
    rank: int = 0
    world_size: int = 1
    kv_quantization: str | None = None
    layout_version: int = LAYOUT_VERSION

    def root(self, adapter: str | None = None, tenant_salt: str | None = None) -> bytes:
        """Parent key of a sequence's first block.

        Args:
            adapter: LoRA adapter's name and version; None for the base model.
            tenant_salt: requests with different salts never share blocks.
        """
        own = [(field.name, getattr(self, field.name)) for field in fields(self)]
        parts = [*own, ("adapter", adapter), ("tenant_salt", tenant_salt)]
        return _digest(*((tag, None if value is None else str(value).encode()) for tag, value in parts))


def next_key(parent: bytes, token_ids: IntArray) -> bytes:
    """Key of the block with these tokens (int32 ``[block_size]``) behind the block with key ``parent``."""
    return _digest(("parent", parent), ("tokens", token_ids.astype("<i4", copy=False).tobytes()))


def chain(root: bytes, token_ids: IntArray, block_size: int, first: int = 0) -> list[bytes]:
    """Keys of the full blocks of ``token_ids`` from block ``first`` on; ``root`` is the key before that block."""
    keys: list[bytes] = []
    parent = root
    for start in range(first * block_size, len(token_ids) - block_size + 1, block_size):
        parent = next_key(parent, token_ids[start : start + block_size])
        keys.append(parent)
    return keys
