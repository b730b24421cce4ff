from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st
from tests.pipeline.tiny_tokenizer import tiny_hf_tokenizer
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models

from dflash2.pipeline.detokenizer import MAX_CHARACTER_TOKENS, REPLACEMENT, IncrementalDetokenizer, StopStrings
from dflash2.pipeline.tokenizer import Tokenizer

TINY = Tokenizer(tiny_hf_tokenizer())
IM_END = 257


def ids(text: str | bytes) -> list[int]:
    """One token per byte."""
    return list(text.encode() if isinstance(text, str) else text)


def pieces(token_ids: Sequence[int], prompt_ids: Sequence[int] = ()) -> list[str]:
    detokenizer = IncrementalDetokenizer(TINY.decode, prompt_ids)
    return [*(detokenizer.push(token_id) for token_id in token_ids), detokenizer.flush()]


@given(st.text())
def test_text_comes_back_whole(text: str) -> None:
    assert "".join(pieces(ids(text))) == text


@given(st.text(alphabet="aé漢😀"))
def test_only_whole_characters_are_emitted(text: str) -> None:
    assert REPLACEMENT not in "".join(pieces(ids(text)))
    assert [piece for piece in pieces(ids(text)) if piece] == list(text)


@given(st.lists(st.integers(0, IM_END), max_size=60))
def test_any_tokens_give_the_text_of_decoding_them_at_once(token_ids: list[int]) -> None:
    """Except that an unfinished character at the very end is dropped."""
    assert "".join(pieces(token_ids)).rstrip(REPLACEMENT) == TINY.decode(token_ids).rstrip(REPLACEMENT)


def test_bytes_that_become_no_character_do_not_hold_the_text_back() -> None:
    junk = ids(b"\x80") * 50
    out = pieces(junk)
    assert len("".join(out[:-1])) >= 50 - MAX_CHARACTER_TOKENS
    assert "".join(pieces(junk + ids("😀!"))) == REPLACEMENT * 50 + "😀!"


def test_an_unfinished_character_at_the_end_is_dropped() -> None:
    assert "".join(pieces(ids("ab😀")[:-1])) == "ab"


def test_a_character_that_the_prompt_leaves_unfinished_is_completed() -> None:
    token_ids = ids("ab😀cd")
    assert "".join(pieces(token_ids[4:], prompt_ids=token_ids[:4])) == "😀cd"


@given(st.text(alphabet="aé漢😀", max_size=8), st.lists(st.integers(0, 8), max_size=3))
def test_special_tokens_have_no_text_wherever_they_are(text: str, places: list[int]) -> None:
    token_ids = ids(text)
    at_characters = [len(text[:place].encode()) for place in sorted(places, reverse=True)]
    for place in at_characters:
        token_ids.insert(place, IM_END)
    assert "".join(pieces(token_ids)) == text


def test_the_window_stays_short() -> None:
    detokenizer = IncrementalDetokenizer(TINY.decode)
    for token_id in [*ids("some text, 漢字 too. ") * 50, *ids(b"\x80") * 100, *[IM_END] * 100]:
        detokenizer.push(token_id)
        assert len(detokenizer._window) <= 3 * MAX_CHARACTER_TOKENS + 1


# The other family of decoders: a space is part of the next word, and unknown characters are byte tokens.
WORDS = ("<unk>", "▁Hello", "▁world", "!", *(f"<0x{byte:02X}>" for byte in range(256)), "<mark>")


def sentencepiece_text(words: Sequence[str], prompt: Sequence[str] = ()) -> str:
    backend = Backend(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<unk>"))
    backend.add_special_tokens(["<mark>"])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    detokenizer = IncrementalDetokenizer(backend.decode, [WORDS.index(word) for word in prompt])
    return "".join([*(detokenizer.push(WORDS.index(word)) for word in words), detokenizer.flush()])


def test_sentencepiece_spaces_between_words_are_kept() -> None:
    assert sentencepiece_text(["▁Hello", "▁world", "!"]) == "Hello world!"


def test_sentencepiece_a_special_token_does_not_swallow_the_space_after_it() -> None:
    assert sentencepiece_text(["▁Hello", "<mark>", "▁world", "<mark>", "<mark>", "▁world"]) == "Hello world world"


def test_sentencepiece_the_space_after_the_prompt_is_kept() -> None:
    assert sentencepiece_text(["▁world"], prompt=["▁Hello"]) == " world"


@given(st.text(alphabet="é漢😀", min_size=1, max_size=6))
def test_sentencepiece_characters_of_byte_tokens(text: str) -> None:
    words = [f"<0x{byte:02X}>" for byte in text.encode()]
    assert sentencepiece_text(["▁Hello", *words, "!"]) == f"Hello{text}!"


def stop_text(parts: Sequence[str], stops: Sequence[str]) -> tuple[str, bool]:
    matcher = StopStrings(stops)
    shown = ""
    for part in parts:
        text, stopped = matcher.push(part)
        shown += text
        if stopped:
            return shown, True
    return shown + matcher.flush(), False


def test_a_stop_string_across_pieces_is_found_and_nothing_of_it_shown() -> None:
    matcher = StopStrings(["STOP"])
    assert matcher.push("go S") == ("go ", False)
    assert matcher.push("TO") == ("", False)
    assert matcher.push("P now") == ("", True)


def test_held_text_is_shown_when_it_was_no_stop_string() -> None:
    matcher = StopStrings(["STOP"])
    assert matcher.push("ST") == ("", False)
    assert matcher.push("ART") == ("START", False)
    assert matcher.push("S") == ("", False)
    assert matcher.flush() == "S"


def test_of_several_the_one_complete_first_counts() -> None:
    assert stop_text(["xabcd"], ["abcd", "c"]) == ("xab", True)
    assert stop_text(["xabcd"], ["abc", "bc"]) == ("x", True)


def test_without_stop_strings_nothing_is_held() -> None:
    assert StopStrings([]).push("text") == ("text", False)


@given(
    st.text(alphabet="ab", max_size=30),
    st.lists(st.text(alphabet="ab", min_size=1, max_size=5), max_size=3),
    st.lists(st.integers(0, 30), max_size=10),
)
def test_how_the_text_is_cut_makes_no_difference(text: str, stops: list[str], cuts: list[int]) -> None:
    edges = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    parts = [text[a:b] for a, b in pairwise(edges)]
    ends = [text.find(stop) + len(stop) for stop in stops if stop in text]
    if not ends:
        assert stop_text(parts, stops) == (text, False)
    else:
        before = text[: min(ends)]
        start = min(len(before) - len(stop) for stop in stops if before.endswith(stop))
        assert stop_text(parts, stops) == (text[:start], True)
