"""SGLang's page hashes as block keys."""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Callable, Iterable
from dataclasses import replace

from dflash2.table.keys import KeyNamespace
from dflash2.types import KEY_BYTES


class PageKeys:
    """Keys of pages by their hashes.

    SGLang's hash of a page covers its tokens, all tokens before it, the adapter and the cache salt; the namespace adds
    model, weights, dtype, page size and rank layout.

    Args:
        namespace: ``weights_version`` is what the user calls the weights.
        fingerprint: hash of the weights as they are when it is called.
    """

    def __init__(self, namespace: KeyNamespace, fingerprint: Callable[[], str]) -> None:
        self._namespace = namespace
        self._fingerprint = fingerprint
        self._root: bytes | None = None
        """None until the first key: an update of the weights may consist of many, with a flush after each."""

    @property
    def namespace(self) -> KeyNamespace:
        """With the weights as they are now."""
        return self._with_weights(self._fingerprint())

    def of(self, page_hashes: Iterable[str]) -> list[bytes]:
        """Keys of these pages."""
        if self._root is None:
            self._root = self.namespace.root()
        root = self._root
        return [hashlib.blake2b(bytes.fromhex(each), digest_size=KEY_BYTES, key=root).digest() for each in page_hashes]

    def renew(self) -> None:
        """The engine has no KV left: what it computes next is of the weights as they are then."""
        self._root = None

    def weights_changed(self) -> None:
        """The weights may be others now, while the engine still has KV of the earlier ones.

        What it computes on top of that belongs to no set of weights: until ``renew`` its keys are new ones that no
        other process can find.
        """
        if self._root is not None:
            self._root = self._with_weights(f"mixed {secrets.token_hex(16)}").root()

    def _with_weights(self, weights: str) -> KeyNamespace:
        return replace(self._namespace, weights_version=f"{self._namespace.weights_version}/{weights}")
