"""What a single token stands for: its bytes, which need not be whole characters."""

from __future__ import annotations

import re
from typing import Any

REPLACEMENT = "\ufffd"
_WORD_START = "\u2581"
"""How SentencePiece writes a space."""
_BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")


class TokenBytes:
    """Looks tokens up in a tokenizer and keeps what it has found.

    Args:
        backend: of the ``tokenizers`` library.
    """

    def __init__(self, backend: Any) -> None:
        self._backend = backend
        self._found: dict[int, bytes] = {}

    def __call__(self, token_id: int) -> bytes:
        """UTF-8 bytes of the token's text; of a special token, its name's."""
        if token_id not in self._found:
            self._found[token_id] = self._look_up(token_id)
        return self._found[token_id]

    def _look_up(self, token_id: int) -> bytes:
        token = self._backend.id_to_token(token_id)
        if token is None:
            return b""  # the vocabulary is padded
        text = str(self._backend.decode([token_id], skip_special_tokens=False))
        if REPLACEMENT not in text:
            # On its own a token loses the space before it.
            return (" " + text if token.startswith(_WORD_START) and not text.startswith(" ") else text).encode()
        byte = _BYTE_TOKEN.fullmatch(token)
        if byte:
            return bytes([int(byte[1], 16)])
        if all(character in _BYTE_OF for character in token):
            return bytes(_BYTE_OF[character] for character in token)
        return text.encode()


def _byte_alphabet() -> dict[str, int]:
    """The characters in which byte-level vocabularies write bytes: printable ones as they are, others from U+0100."""
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + n): byte for n, byte in enumerate(others)}


_BYTE_OF = _byte_alphabet()
