from __future__ import annotations

import asyncio
import threading

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.pipeline.tiny_tokenizer import tiny_hf_tokenizer
from tokenizers import AddedToken, models, normalizers
from tokenizers import Tokenizer as Backend
from tokenizers.pre_tokenizers import ByteLevel
from transformers import PreTrainedTokenizerFast

from dflash2.errors import ModelError
from dflash2.pipeline.tokenizer import LONG_TEXT_CHARS, Tokenizer
from dflash2.types import IntArray


@pytest.fixture
def tokenizer():
    tokenizer = Tokenizer(tiny_hf_tokenizer(), num_threads=1)
    yield tokenizer
    tokenizer.close()


async def in_a_thread(tokenizer: Tokenizer, text: str) -> IntArray:
    return await tokenizer.run(lambda: tokenizer.encode(text, add_special_tokens=False), len(text))


def test_ids_are_int32_and_come_back(tokenizer: Tokenizer) -> None:
    token_ids = tokenizer.encode("é!<|im_end|>", add_special_tokens=False)
    assert token_ids.dtype == np.int32
    assert token_ids.tolist() == [*"é!".encode(), 257]
    assert tokenizer.decode(token_ids.tolist()) == "é!"
    assert tokenizer.vocab_size == 258


def test_an_empty_text_has_no_tokens(tokenizer: Tokenizer) -> None:
    assert tokenizer.encode("", add_special_tokens=True).shape == (0,)


def test_the_same_off_the_loop(tokenizer: Tokenizer) -> None:
    names = []

    async def main() -> list[int]:
        await tokenizer.run(lambda: names.append(threading.current_thread().name), 1)
        return (await in_a_thread(tokenizer, "ab")).tolist()

    assert asyncio.run(main()) == [97, 98]
    assert names[0].startswith("dflash2-tokenizer")


def test_a_short_text_is_not_held_behind_a_long_one(tokenizer: Tokenizer) -> None:
    async def main() -> None:
        blocker, started = threading.Event(), threading.Event()

        def work() -> bool:
            started.set()
            return blocker.wait(20)

        long = asyncio.create_task(tokenizer.run(work, LONG_TEXT_CHARS + 1))
        await asyncio.to_thread(started.wait, 20)
        short = await in_a_thread(tokenizer, "ab")
        assert len(short) == 2
        assert not long.done()
        blocker.set()
        assert await long

    asyncio.run(asyncio.wait_for(main(), 30))


def test_many_threads_at_once_agree(tokenizer: Tokenizer) -> None:
    texts = ["x" * n for n in range(200)]

    async def main() -> list[int]:
        many = Tokenizer(tokenizer.hf, num_threads=4)
        ids = await asyncio.gather(*(in_a_thread(many, text) for text in texts))
        many.close()
        return [len(one) for one in ids]

    assert asyncio.run(main()) == list(range(200))


def test_a_slow_tokenizer_is_refused() -> None:
    with pytest.raises(ModelError, match=r"tokenizer\.json"):
        Tokenizer(object())


@pytest.mark.parametrize("normalizer", [None, normalizers.NFC()])
@given(text=st.text(alphabet="ab \n\té́각", max_size=60))
def test_never_fewer_tokens_than_told(normalizer: normalizers.Normalizer | None, text: str) -> None:
    hf = tiny_hf_tokenizer()
    if normalizer is not None:
        hf.backend_tokenizer.normalizer = normalizer
    tokenizer = Tokenizer(hf, num_threads=1)
    assert len(tokenizer.encode(text, add_special_tokens=False)) >= tokenizer.fewest_tokens(text)
    tokenizer.close()


def test_composition_joins_characters() -> None:
    """A letter and its two marks become one character of two bytes, and those one token."""
    decomposed, composed = "U\u0308\u0301", "\u01d7"
    level = ByteLevel(add_prefix_space=False, use_regex=False)
    ((letters, _),) = level.pre_tokenize_str(composed)
    vocab = {piece: i for i, piece in enumerate([*ByteLevel.alphabet(), letters])}
    backend = Backend(models.BPE(vocab=vocab, merges=[tuple(letters)]))
    backend.pre_tokenizer, backend.normalizer = level, normalizers.NFC()
    tokenizer = Tokenizer(PreTrainedTokenizerFast(tokenizer_object=backend), num_threads=1)
    assert len(tokenizer.encode(decomposed * 8, add_special_tokens=False)) == 8
    assert 0 < tokenizer.fewest_tokens(decomposed * 8) <= 8
    tokenizer.close()


@given(text=st.text(max_size=40))
def test_bytes_that_a_vocabulary_lacks_are_dropped_not_whole_characters(text: str) -> None:
    """As in vocabularies that were learned from text: they know no byte that did not occur there."""
    level = ByteLevel(add_prefix_space=False, use_regex=False)
    ((rare, _),) = level.pre_tokenize_str("\U00040000\x13")
    unknown = {rare[0], rare[-1]}
    vocab = {letter: i for i, letter in enumerate(set(ByteLevel.alphabet()) - unknown)}
    backend = Backend(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = level
    tokenizer = Tokenizer(PreTrainedTokenizerFast(tokenizer_object=backend), num_threads=1)
    assert tokenizer.fewest_tokens("abc") == 3
    assert len(tokenizer.encode(text, add_special_tokens=False)) >= tokenizer.fewest_tokens(text)
    assert tokenizer.encode("\x13" * 9, add_special_tokens=False).size == tokenizer.fewest_tokens("\x13" * 9) == 0
    tokenizer.close()


@pytest.mark.parametrize(
    ("model", "normalizer"),
    [
        (models.WordPiece(vocab={"[UNK]": 0, "a": 1}, unk_token="[UNK]"), None),
        (models.Unigram(vocab=[("<unk>", 0.0), ("a", -1.0)], unk_id=0), None),
        (models.BPE(vocab={"a": 0}, merges=[]), None),
        (models.BPE(vocab={x: i for i, x in enumerate(ByteLevel.alphabet())}, merges=[]), normalizers.StripAccents()),
    ],
)
def test_where_one_token_may_stand_for_anything_nothing_is_promised(model: object, normalizer: object) -> None:
    backend = Backend(model)
    if normalizer is not None:
        backend.normalizer = normalizer
    tokenizer = Tokenizer(PreTrainedTokenizerFast(tokenizer_object=backend), num_threads=1)
    assert tokenizer.fewest_tokens("z" * 10_000) == 0
    tokenizer.close()


def test_a_tokenizer_that_cuts_texts_off_does_not_here() -> None:
    hf = tiny_hf_tokenizer()
    hf.backend_tokenizer.enable_truncation(10)
    tokenizer = Tokenizer(hf, num_threads=1)
    assert len(tokenizer.encode("a" * 50, add_special_tokens=False)) == 50
    tokenizer.close()


def test_an_added_token_may_swallow_any_space() -> None:
    hf = tiny_hf_tokenizer()
    hf.backend_tokenizer.add_tokens([AddedToken("<|pad|>", rstrip=True)])
    tokenizer = Tokenizer(hf, num_threads=1)
    text = "<|pad|>" + "\u3000\u00a0\u2028" * 500
    assert len(tokenizer.encode(text, add_special_tokens=False)) == tokenizer.fewest_tokens(text) == 1
    tokenizer.close()


def test_white_space_does_not_count(tokenizer: Tokenizer) -> None:
    longest = len("<|im_start|>")
    assert tokenizer.fewest_tokens(" \n" * 1000) == 0
    assert tokenizer.fewest_tokens("a " * longest * 5) == 5
    assert tokenizer.fewest_tokens("a" * (longest * 5 + 1)) == 6
