"""Log-probabilities in the two shapes of OpenAI's API."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dflash2.server.answer_text import TokenEntry


def chat_logprobs(tokens: Sequence[TokenEntry]) -> dict[str, Any]:
    """``logprobs`` of a chat's choice."""
    content = [
        {**_chat_token(entry.raw, entry.logprob), "top_logprobs": [_chat_token(raw, lp) for raw, lp in entry.top]}
        for entry in tokens
    ]
    return {"content": content, "refusal": None}


def completion_logprobs(tokens: Sequence[TokenEntry]) -> dict[str, Any]:
    """``logprobs`` of a completion's choice: the likeliest tokens and the chosen one."""
    return {
        "tokens": [_spelled(entry.raw) for entry in tokens],
        "token_logprobs": [entry.logprob for entry in tokens],
        "top_logprobs": [
            {_spelled(raw): logprob for raw, logprob in (*entry.top, (entry.raw, entry.logprob))} for entry in tokens
        ],
        "text_offset": [entry.text_offset for entry in tokens],
    }


def _chat_token(raw: bytes, logprob: float) -> dict[str, Any]:
    return {"token": raw.decode(errors="backslashreplace"), "logprob": logprob, "bytes": list(raw)}


def _spelled(raw: bytes) -> str:
    """Text, or the bytes where they are no text."""
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)
