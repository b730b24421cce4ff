"""SGLang's page hashes as block keys."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

from dflash2.types import KEY_BYTES


def block_keys(root: bytes, page_hashes: Iterable[str]) -> list[bytes]:
    """Keys of pages by their hashes.

    SGLang's hash of a page covers its tokens, all tokens before it, the adapter and the cache salt; ``root`` (see
    ``KeyNamespace``) adds model, weights version, dtype, page size and rank layout.
    """
    return [hashlib.blake2b(bytes.fromhex(each), digest_size=KEY_BYTES, key=root).digest() for each in page_hashes]
