"""Text to token ids, off the event loop, so that a long prompt holds up neither the server nor a short prompt."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import numpy as np
from tokenizers import models
from tokenizers.normalizers import NFC
from tokenizers.pre_tokenizers import ByteLevel

from dflash2.errors import ModelError
from dflash2.pipeline.handoff import TokenIds
from dflash2.types import IntArray

LONG_TEXT_CHARS = 32 * 1024
"""Texts above this share one thread of their own: about 30 ms of byte-pair encoding on one core."""
MAY_BE_DROPPED = "".join(char for char in map(chr, range(0x3001)) if char.isspace() or char < " " or char == "\x7f")
COMPOSED_CHARS = 4
"""Unicode composition (NFC) joins a letter and its marks, three characters as a rule; some room above that."""

T = TypeVar("T")


class Tokenizer:
    """A ``transformers`` fast tokenizer with two lanes of threads: one for long texts, the other for all else.

    The encoder releases the GIL, so the event loop and the engine's thread go on meanwhile.

    Args:
        hf: a fast tokenizer of ``transformers``.
        num_threads: threads for texts of ordinary length.

    Raises:
        ModelError: the tokenizer has no fast (``tokenizers``) backend.
    """

    def __init__(self, hf: Any, num_threads: int = 2) -> None:
        backend = getattr(hf, "backend_tokenizer", None)
        if backend is None:
            raise ModelError(f"{type(hf).__name__} is not a fast tokenizer; a tokenizer.json is needed")
        self._hf = hf
        self.num_threads = num_threads
        # The backend is called directly: the wrapper above it changes shared truncation state and is not thread-safe.
        self._backend = backend
        backend.no_truncation()  # a tokenizer.json may ask for it; a prompt is served whole or refused
        self._longest_token_chars = _longest_token_chars(backend)
        self._short_lane = ThreadPoolExecutor(num_threads, thread_name_prefix="dflash2-tokenizer")
        self._long_lane = ThreadPoolExecutor(1, thread_name_prefix="dflash2-tokenizer-long")

    @property
    def hf(self) -> Any:
        """The wrapped ``transformers`` tokenizer, for chat templates."""
        return self._hf

    @property
    def vocab_size(self) -> int:
        """Token ids are below this, added tokens included."""
        return int(self._backend.get_vocab_size(with_added_tokens=True))

    def fewest_tokens(self, text: str) -> int:
        """No fewer tokens than this come out of a text, told at once; 0 where that cannot be known.

        White space and control characters do not count: they may be dropped.
        """
        if self._longest_token_chars is None:
            return 0
        num_chars = len(text) - sum(map(text.count, MAY_BE_DROPPED))
        if self._backend.normalizer is not None:
            num_chars //= COMPOSED_CHARS
        return -(-num_chars // self._longest_token_chars)

    def encode(self, text: str, *, add_special_tokens: bool) -> IntArray:
        """Token ids of a text, int32 ``[n]``; n may be 0.

        Args:
            text: any text.
            add_special_tokens: put the model's own begin and end marks around it. Off for rendered chats,
                whose template already writes them.
        """
        encoding = self._backend.encode(text, add_special_tokens=add_special_tokens)
        return np.asarray(encoding.ids, dtype=np.int32)

    def encode_batch(self, texts: Sequence[str], *, add_special_tokens: bool) -> list[TokenIds]:
        """Token ids of several texts, as the backend holds them: no list of them is made yet. See ``encode``."""
        if len(texts) == 1:
            return [self._backend.encode(texts[0], add_special_tokens=add_special_tokens)]
        return list(self._backend.encode_batch(list(texts), add_special_tokens=add_special_tokens))

    async def run(self, work: Callable[[], T], num_chars: int) -> T:
        """Run text work in the lane for its size.

        Args:
            work: called in a thread.
            num_chars: how much text it handles.
        """
        lane = self._long_lane if num_chars > LONG_TEXT_CHARS else self._short_lane
        return await asyncio.get_running_loop().run_in_executor(lane, work)

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of token ids without special tokens; bytes that are no UTF-8 become U+FFFD."""
        return str(self._backend.decode(token_ids, skip_special_tokens=True))

    def close(self) -> None:
        """Stop the threads. Texts already handed over are finished, those still waiting are dropped. Idempotent."""
        for lane in (self._short_lane, self._long_lane):
            lane.shutdown(wait=False, cancel_futures=True)


def _longest_token_chars(backend: Any) -> int | None:
    """Characters of a text that one token stands for at most; None where a token may stand for any number.

    Byte-pair encoding of bytes makes no token for several unknown characters, and drops only single bytes that it does
    not know. With those of ASCII and all that continue a character, something is left of each.
    """
    vocab = backend.get_vocab(with_added_tokens=True)
    if not isinstance(backend.model, models.BPE) or not isinstance(backend.normalizer, NFC | None):
        return None
    known = [*map(chr, range(0x21, 0x7F)), *(_byte_letters(chr(code))[-1] for code in range(0x80, 0xC0))]
    keeps_something = backend.model.byte_fallback or all(letter in vocab for letter in known)
    return max(map(len, vocab)) if keeps_something else None


def _byte_letters(text: str) -> str:
    """The bytes of a text as byte-level tokenizers write them, a letter each."""
    ((letters, _),) = ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str(text)
    return str(letters)
