"""One answer while its tokens arrive: text, stop strings, and the log-probabilities that belong to the text."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from dflash2.engine.base import FinishReason, TokenOutput
from dflash2.pipeline.detokenizer import IncrementalDetokenizer, StopStrings


@dataclass(frozen=True, slots=True)
class TextDelta:
    """New text of one choice.

    Attributes:
        index: which choice.
        text: whole characters, stop strings removed; empty together with ``finish_reason`` or ``tokens`` only.
        finish_reason: ``stop`` or ``length`` on the last delta.
        num_output_tokens: generated up to here, the stop token included.
        tokens: those that the text consists of, if their log-probabilities are asked for.
    """

    index: int
    text: str
    finish_reason: str | None
    num_prompt_tokens: int
    num_cached_tokens: int
    num_output_tokens: int
    tokens: tuple[TokenEntry, ...] = ()


@dataclass(frozen=True, slots=True)
class TokenEntry:
    """One token of an answer with its log-probability.

    Attributes:
        raw: its bytes.
        top: the likeliest tokens at its place, each with its log-probability.
        text_offset: where in the answer its text begins, in characters.
    """

    raw: bytes
    logprob: float
    top: tuple[tuple[bytes, float], ...]
    text_offset: int


class AnswerText:
    """Turns one answer's outputs into deltas.

    Text is held back while it may be half a character or the beginning of a stop string, and the tokens with it.

    Args:
        index: of the choice.
        decode: token ids to text.
        token_bytes: bytes of one token.
        prompt_end: the prompt's last tokens.
        stops: stop strings.
    """

    def __init__(
        self,
        index: int,
        decode: Callable[[Sequence[int]], str],
        token_bytes: Callable[[int], bytes],
        prompt_end: Sequence[int],
        stops: Sequence[str],
    ) -> None:
        self.ended = False
        self._index = index
        self._token_bytes = token_bytes
        self._detokenizer = IncrementalDetokenizer(decode, prompt_end)
        self._matcher = StopStrings(stops)
        self._num_output = 0
        self._num_decoded = 0
        """Characters that the detokenizer has given out."""
        self._num_shown = 0
        """Characters that have been told."""
        self._held: deque[TokenEntry] = deque()

    def push(self, output: TokenOutput) -> TextDelta | None:
        """Add one output of the answer that has not failed; None if there is nothing to tell yet."""
        ends = output.finish_reason is not None
        text = ""
        if output.token_id is not None:
            self._num_output += 1
            # The token that stops the output is not part of it.
            if output.finish_reason is not FinishReason.STOP:
                self._hold_entry(output)
                text = self._detokenizer.push(output.token_id)
        if ends:
            text += self._detokenizer.flush()
        self._num_decoded += len(text)
        text, stopped = self._matcher.push(text)
        if ends and not stopped:
            text += self._matcher.flush()
        self.ended = ends or stopped
        self._num_shown += len(text)
        tokens = self._released(all_of_them=ends and not stopped)
        reason = "stop" if stopped else output.finish_reason.value if output.finish_reason else None
        if not text and not tokens and reason is None:
            return None
        return TextDelta(
            self._index,
            text,
            reason,
            output.num_prompt_tokens,
            output.num_cached_tokens,
            self._num_output,
            tokens,
        )

    def _hold_entry(self, output: TokenOutput) -> None:
        told = output.logprobs
        if told is None or output.token_id is None:
            return
        top = zip(told.top_ids, told.top_logprobs, strict=True)
        self._held.append(
            TokenEntry(
                self._token_bytes(output.token_id),
                told.logprob,
                tuple((self._token_bytes(token), logprob) for token, logprob in top),
                self._num_decoded,
            )
        )

    def _released(self, *, all_of_them: bool) -> tuple[TokenEntry, ...]:
        """Tokens whose text has begun to be shown; those of a stop string never are."""
        released = []
        while self._held and (all_of_them or self._held[0].text_offset < self._num_shown):
            released.append(self._held.popleft())
        return tuple(released)
