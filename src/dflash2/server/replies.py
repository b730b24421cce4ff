"""The JSON of answers: whole ones and the chunks of a stream, for chats and for plain completions."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from dflash2.server.answer_text import TextDelta, TokenEntry
from dflash2.server.logprobs import chat_logprobs, completion_logprobs


@dataclass(slots=True)
class Choice:
    """What one choice has become so far."""

    parts: list[str] = field(default_factory=list)
    tokens: list[TokenEntry] = field(default_factory=list)
    last: TextDelta | None = None

    @property
    def text(self) -> str:
        """All text so far."""
        return "".join(self.parts)

    @property
    def finish_reason(self) -> str | None:
        """Why it ended, once it has."""
        return self.last.finish_reason if self.last else None


class Choices:
    """Collects the deltas of an answer.

    Args:
        num_choices: how many there will be.
        per_prompt: how many of them, one after the other, answer the same prompt.
    """

    def __init__(self, num_choices: int, per_prompt: int = 1) -> None:
        self.all = [Choice() for _ in range(num_choices)]
        self._per_prompt = per_prompt

    def add(self, delta: TextDelta) -> None:
        """Take one delta in."""
        choice = self.all[delta.index]
        choice.parts.append(delta.text)
        choice.tokens.extend(delta.tokens)
        choice.last = delta

    def usage(self) -> dict[str, Any]:
        """Token counts over all choices; a prompt counts once, however many answers it gets."""
        firsts = [choice.last for choice in self.all[:: self._per_prompt] if choice.last is not None]
        num_prompt = sum(delta.num_prompt_tokens for delta in firsts)
        num_output = sum(choice.last.num_output_tokens for choice in self.all if choice.last is not None)
        return {
            "prompt_tokens": num_prompt,
            "completion_tokens": num_output,
            "total_tokens": num_prompt + num_output,
            "prompt_tokens_details": {"cached_tokens": sum(delta.num_cached_tokens for delta in firsts)},
        }


class Reply(Protocol):
    """One kind of answer."""

    id: str

    def whole(self, choices: Choices) -> dict[str, Any]:
        """The answer in one piece."""

    def opening(self, num_choices: int) -> Sequence[dict[str, Any]]:
        """Chunks before the first text."""

    def chunk(self, delta: TextDelta) -> Sequence[dict[str, Any]]:
        """Chunks for one delta."""

    def usage_chunk(self, usage: dict[str, Any]) -> dict[str, Any]:
        """The last chunk, if usage was asked for."""


class _Envelope:
    """What every object of one answer repeats."""

    prefix: str

    def __init__(self, model: str, *, with_logprobs: bool = False) -> None:
        self.id = f"{self.prefix}-{uuid.uuid4().hex}"
        self._with_logprobs = with_logprobs
        self._model = model
        self._created = int(time.time())

    def _object(self, kind: str, choices: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": kind,
            "created": self._created,
            "model": self._model,
            "choices": choices,
            **more,
        }


class ChatReply(_Envelope):
    """``chat.completion`` and ``chat.completion.chunk``."""

    prefix = "chatcmpl"

    def whole(self, choices: Choices) -> dict[str, Any]:
        items = [
            {
                "index": index,
                "message": {"role": "assistant", "content": choice.text, "refusal": None},
                "logprobs": self._logprobs(choice.tokens),
                "finish_reason": choice.finish_reason,
            }
            for index, choice in enumerate(choices.all)
        ]
        return self._object("chat.completion", items, usage=choices.usage())

    def opening(self, num_choices: int) -> list[dict[str, Any]]:
        return [self._chunk(index, {"role": "assistant", "content": ""}, None) for index in range(num_choices)]

    def chunk(self, delta: TextDelta) -> list[dict[str, Any]]:
        chunks = []
        if delta.text or delta.tokens:
            chunks.append(self._chunk(delta.index, {"content": delta.text}, None, delta.tokens))
        if delta.finish_reason:
            chunks.append(self._chunk(delta.index, {}, delta.finish_reason))
        return chunks

    def usage_chunk(self, usage: dict[str, Any]) -> dict[str, Any]:
        return self._object("chat.completion.chunk", [], usage=usage)

    def _chunk(
        self, index: int, delta: dict[str, Any], reason: str | None, tokens: Sequence[TokenEntry] = ()
    ) -> dict[str, Any]:
        logprobs = self._logprobs(tokens) if tokens else None
        choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": reason}
        return self._object("chat.completion.chunk", [choice])

    def _logprobs(self, tokens: Sequence[TokenEntry]) -> dict[str, Any] | None:
        return chat_logprobs(tokens) if self._with_logprobs else None


class CompletionReply(_Envelope):
    """``text_completion``, whole and in chunks."""

    prefix = "cmpl"

    def whole(self, choices: Choices) -> dict[str, Any]:
        items = [
            self._item(i, choice.text, choice.finish_reason, choice.tokens) for i, choice in enumerate(choices.all)
        ]
        return self._object("text_completion", items, usage=choices.usage())

    def opening(self, num_choices: int) -> list[dict[str, Any]]:
        return []

    def chunk(self, delta: TextDelta) -> list[dict[str, Any]]:
        item = self._item(delta.index, delta.text, delta.finish_reason, delta.tokens)
        return [self._object("text_completion", [item])]

    def usage_chunk(self, usage: dict[str, Any]) -> dict[str, Any]:
        return self._object("text_completion", [], usage=usage)

    def _item(self, index: int, text: str, reason: str | None, tokens: Sequence[TokenEntry]) -> dict[str, Any]:
        logprobs = completion_logprobs(tokens) if self._with_logprobs else None
        return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": reason}
