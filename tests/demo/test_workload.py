"""Conversations about real files, of exact length."""

from __future__ import annotations

from typing import Any

import pytest

from dflash2.demo.workload import make_chats
from dflash2.errors import ModelError


class Characters:
    """A tokenizer with one token per character and a plain template."""

    chat_template: str | None = "plain"

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        assert not add_special_tokens
        return [ord(character) for character in text]

    def apply_chat_template(self, messages: list[dict[str, str]], tokenize: bool, add_generation_prompt: bool) -> str:
        assert not tokenize and add_generation_prompt
        return "".join(f"<{message['role']}>{message['content']}\n" for message in messages) + "<assistant>"


def test_each_conversation_has_the_length_asked_for() -> None:
    chats = make_chats(Characters(), num_chats=5, num_turns=3, output_tokens=7, context_tokens=1500)
    assert len({chat.name for chat in chats}) == 5
    for chat in chats:
        assert len(chat.opening) + sum(map(len, chat.follow_ups)) + 3 * 7 == 1500
        text = "".join(map(chr, chat.opening.tolist()))
        assert text.startswith(f"<user>This is {chat.name}") and text.endswith("<assistant>")
        assert "GOES-HERE" not in text
        assert ["".join(map(chr, ids.tolist()))[:8] for ids in chat.follow_ups] == ["\n<user>W", "\n<user>W"]


def test_the_same_call_gives_the_same_chats() -> None:
    first, second = (make_chats(Characters(), 3, 2, 5, 1200) for _ in range(2))
    assert [chat.opening.tolist() for chat in first] == [chat.opening.tolist() for chat in second]


def test_too_short_a_context_is_refused() -> None:
    with pytest.raises(ModelError, match="no room for a document"):
        make_chats(Characters(), 1, 3, 48, 200)


def test_a_model_without_a_template_is_refused() -> None:
    tokenizer: Any = Characters()
    tokenizer.chat_template = None
    with pytest.raises(ModelError, match="chat template"):
        make_chats(tokenizer, 1, 1, 1, 1200)
