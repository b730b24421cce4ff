"""Asks one question and measures the answer as it streams in."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from typing import Any

import httpx

from dflash2.errors import DFlash2Error


@dataclass(frozen=True, slots=True)
class Sample:
    """One request as its client saw it. Times in seconds from the beginning of the run.

    Attributes:
        session: which conversation.
        turn: which of its questions.
        start_s: when it was sent.
        first_s: when the first text came; None if none came.
        end_s: when it ended.
        prompt_tokens, cached_tokens, output_tokens: as the server counts them; 0 where it does not say.
        error: why it failed; empty if it did not.
    """

    session: int
    turn: int
    start_s: float
    first_s: float | None
    end_s: float
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    error: str = ""

    @property
    def ttft_s(self) -> float | None:
        """Time to first token."""
        return None if self.first_s is None else self.first_s - self.start_s

    @property
    def tpot_s(self) -> float | None:
        """Time per output token after the first; None for a single one."""
        if self.first_s is None or self.output_tokens < 2:
            return None
        return (self.end_s - self.first_s) / (self.output_tokens - 1)


class ChatClient:
    """One server.

    Args:
        http: with the server's address and key.
        model: name in the requests.
        more: further fields of each request.
        began: ``time.perf_counter()`` at the beginning of the run.
    """

    def __init__(self, http: httpx.AsyncClient, model: str, more: dict[str, Any], began: float) -> None:
        self._http = http
        self._model = model
        self._more = more
        self._began = began

    async def ask(self, session: int, turn: int, messages: list[dict[str, str]], max_tokens: int) -> tuple[Sample, str]:
        """Send the conversation so far.

        Returns:
            What was measured, and the answer; a failure is part of the sample.
        """
        body = {
            "model": self._model,
            "messages": messages,
            "max_tokens": max_tokens,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
            **self._more,
        }
        start, first, text = self._now(), None, ""
        usage: dict[str, Any] = {}
        try:
            async with self._http.stream("POST", "/v1/chat/completions", json=body) as answer:
                if answer.status_code != 200:
                    await answer.aread()
                    return Sample(session, turn, start, None, self._now(), error=_refusal(answer)), ""
                async for line in answer.aiter_lines():
                    event = _event(line)
                    if "error" in event:
                        return Sample(session, turn, start, first, self._now(), error=str(event["error"])), text
                    piece = _content(event)
                    if piece and first is None:
                        first = self._now()
                    text += piece
                    usage = event.get("usage") or usage
        except (httpx.HTTPError, ValueError) as error:
            return Sample(session, turn, start, first, self._now(), error=f"{type(error).__name__}: {error}"), text
        details = usage.get("prompt_tokens_details") or {}
        counts = (usage.get("prompt_tokens", 0), details.get("cached_tokens") or 0, usage.get("completion_tokens", 0))
        return Sample(session, turn, start, first, self._now(), *counts), text

    def _now(self) -> float:
        return time.perf_counter() - self._began


async def first_model(http: httpx.AsyncClient) -> str:
    """Name of the first model that a server has. Raises DFlash2Error."""
    try:
        answer = await http.get("/v1/models")
        answer.raise_for_status()
        return str(answer.json()["data"][0]["id"])
    except (httpx.HTTPError, ValueError, LookupError) as error:
        raise DFlash2Error(f"{http.base_url} names no model: {error}; is a server there?") from error


def _event(line: str) -> dict[str, Any]:
    data = line.removeprefix("data:").strip()
    if not line.startswith("data:") or data == "[DONE]":
        return {}
    event = json.loads(data)
    return event if isinstance(event, dict) else {}


def _content(event: dict[str, Any]) -> str:
    return "".join((choice.get("delta") or {}).get("content") or "" for choice in event.get("choices") or ())


def _refusal(answer: httpx.Response) -> str:
    try:
        return f"{answer.status_code}: {answer.json()['error']['message']}"
    except (ValueError, LookupError, TypeError):
        return f"{answer.status_code}: {answer.text[:200]}"
