"""Chats about real documents: source files of Python's standard library, several turns each."""

from __future__ import annotations

import sysconfig
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from dflash2.errors import ModelError
from dflash2.types import IntArray

QUESTIONS = (
    "What is this module for? Answer in a few sentences.",
    "Which of its functions or classes is the most important one, and why?",
    "What should somebody who uses it for the first time be careful about?",
    "Suggest one test for it.",
)
_REPLY_MARK = "REPLY-GOES-HERE"
_DOCUMENT_MARK = "DOCUMENT-GOES-HERE"
_CHARACTERS_PER_TOKEN = 6
"""More than source code has, so that a file of this length is long enough."""


@dataclass(frozen=True, slots=True)
class Chat:
    """One conversation.

    Attributes:
        name: the document.
        opening: int32, the prompt of the first turn: the document and the first question.
        follow_ups: int32 each, what stands between an answer and the next one: the end of the answer and the next
            question. The prompt of turn k is everything so far, the answers as the model gave them included.
    """

    name: str
    opening: IntArray
    follow_ups: tuple[IntArray, ...]

    @property
    def num_turns(self) -> int:
        return 1 + len(self.follow_ups)


def make_chats(tokenizer: Any, num_chats: int, num_turns: int, output_tokens: int, context_tokens: int) -> list[Chat]:
    """Chats about different documents, the same on every call with the same Python.

    Args:
        tokenizer: of transformers, with a chat template.
        num_chats: at most the number of large enough files.
        num_turns: 1 to ``len(QUESTIONS)``.
        output_tokens: length of each answer.
        context_tokens: length of each conversation at its end; the document is cut so that it comes out exactly.

    Raises:
        ModelError: the tokenizer has no chat template, or the files or the context are too short.
    """
    if tokenizer.chat_template is None:
        raise ModelError("the demo needs a model with a chat template")
    follow_ups = tuple(_ids(tokenizer, _between_turns(tokenizer, question)) for question in QUESTIONS[1:num_turns])
    chats = []
    for name, text in _documents(num_chats, _CHARACTERS_PER_TOKEN * context_tokens):
        before, after = (_ids(tokenizer, part) for part in _around_document(tokenizer, name))
        rest = sum(map(len, (before, after, *follow_ups))) + num_turns * output_tokens
        if rest >= context_tokens:
            raise ModelError(f"{context_tokens} tokens leave no room for a document; at least {rest + 1} are needed")
        document = _ids(tokenizer, text)[: context_tokens - rest]
        chats.append(Chat(name, np.concatenate([before, document, after]), follow_ups))
    return chats


def _around_document(tokenizer: Any, name: str) -> tuple[str, str]:
    """The first prompt's text before and behind the document."""
    content = f"This is {name} of Python's standard library:\n\n{_DOCUMENT_MARK}\n\n{QUESTIONS[0]}"
    message = {"role": "user", "content": content}
    text: str = tokenizer.apply_chat_template([message], tokenize=False, add_generation_prompt=True)
    before, _, after = text.partition(_DOCUMENT_MARK)
    return before, after


def _between_turns(tokenizer: Any, question: str) -> str:
    """The template's text between an answer and the next one, taken from a conversation with a marked answer."""
    messages = [
        {"role": "user", "content": QUESTIONS[0]},
        {"role": "assistant", "content": _REPLY_MARK},
        {"role": "user", "content": question},
    ]
    text: str = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    return text.partition(_REPLY_MARK)[2]


def _documents(count: int, min_characters: int) -> list[tuple[str, str]]:
    """(file name, text) of the first ``count`` long enough modules of the standard library, by name."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    found = []
    for path in sorted(folder.glob("*.py")):
        if path.stat().st_size >= min_characters:
            found.append((path.name, path.read_text(encoding="utf-8", errors="replace")))
        if len(found) == count:
            return found
    raise ModelError(f"only {len(found)} standard library files have {min_characters} characters; ask for fewer chats")


def _ids(tokenizer: Any, text: str) -> IntArray:
    return np.array(tokenizer.encode(text, add_special_tokens=False), np.int32)
