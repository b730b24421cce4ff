"""Token ids to text while they arrive: whole characters only, and nothing of a stop string."""

from __future__ import annotations

from collections.abc import Callable, Sequence

REPLACEMENT = "\ufffd"
CONTEXT_TOKENS = 5
"""Tokens of the prompt that give the first output token its surroundings (some decoders drop a leading space)."""
MAX_CHARACTER_TOKENS = 4
"""A UTF-8 character has at most four bytes, so at most four tokens."""


class IncrementalDetokenizer:
    """Decodes a window of tokens at each step and emits what can no longer change.

    A text that ends with U+FFFD may be the beginning of a character, so it is held back, but not for longer
    than a character can take: the model may produce bytes that never become one
    (``docs/decisions/030-incremental-detokenizer.md``).

    Args:
        decode: token ids to text, with U+FFFD for broken bytes.
        prompt_ids: the prompt, or its end.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], prompt_ids: Sequence[int] = ()) -> None:
        self._decode = decode
        self._window = [int(token_id) for token_id in prompt_ids[-CONTEXT_TOKENS:]]
        self._num_pending = 0
        """Tokens at the window's end whose text is not all out."""
        self._text = self._decode(self._window)
        # A character that the prompt leaves unfinished belongs to the output.
        self._num_emitted = len(self._text.rstrip(REPLACEMENT))

    def push(self, token_id: int) -> str:
        """Add one token.

        Returns:
            The text that is now certain; may be empty.
        """
        text = self._decode([*self._window, token_id])
        complete = not text.endswith(REPLACEMENT)
        if complete and text == self._text:
            return ""  # a special token: without text, so it cannot serve as context either
        self._window.append(token_id)
        self._num_pending += 1
        self._text = text
        if complete:
            return self._emit(text, num_kept=self._num_pending)
        if self._num_pending > MAX_CHARACTER_TOKENS:
            # Too long for one character: all but the last U+FFFD is broken for good.
            return self._emit(text[:-1], num_kept=2 * MAX_CHARACTER_TOKENS)
        return ""

    def flush(self) -> str:
        """The certain rest at the end of the output; an unfinished character is dropped."""
        return self._text.rstrip(REPLACEMENT)[self._num_emitted :]

    def _emit(self, certain: str, num_kept: int) -> str:
        """Hand out what is new in ``certain`` and shorten the window to its last ``num_kept`` tokens."""
        new = certain[self._num_emitted :]
        num_held = len(self._text) - len(certain)
        self._window = self._window[-num_kept:]
        self._text = self._decode(self._window)
        self._num_emitted = len(self._text) - num_held
        if num_held == 0:
            self._num_pending = 0
        return new


class StopStrings:
    """Finds stop strings across token borders.

    Text is held back while it may be the beginning of a stop string. Where several match, the one that is
    complete first counts; how the text was cut into pieces makes no difference.

    Args:
        stops: non-empty strings.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""

    def push(self, text: str) -> tuple[str, bool]:
        """Add text.

        Returns:
            The text that may be shown, and True if a stop string was found; the text then ends before it
            and the matcher must not be used any more.
        """
        text = self._held + text
        start = self._find(text)
        if start is not None:
            self._held = ""
            return text[:start], True
        num_held = max((_overlap(text, stop) for stop in self._stops), default=0)
        cut = len(text) - num_held
        self._held = text[cut:]
        return text[:cut], False

    def flush(self) -> str:
        """The text still held back, at the end of the output."""
        held, self._held = self._held, ""
        return held

    def _find(self, text: str) -> int | None:
        """Where the stop string that is complete first begins."""
        found = [(start + len(stop), start) for stop in self._stops if (start := text.find(stop)) >= 0]
        return min(found)[1] if found else None


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of ``text`` that is a proper beginning of ``stop``."""
    longest = min(len(text), len(stop) - 1)
    return next((n for n in range(longest, 0, -1) if text.endswith(stop[:n])), 0)
