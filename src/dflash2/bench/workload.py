"""What is asked: conversations with turns, made up from a seed or taken from a trace."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass, field
from pathlib import Path

from dflash2.errors import TraceError

_TEXT = (
    "river stone quiet morning letter garden window paper silver branch winter signal market harbour copper valley "
    "lantern bridge cotton meadow engine planet marble shadow pocket thunder ribbon mirror candle forest island anchor "
    "basket feather hammer ladder needle orange pepper rocket saddle timber velvet walnut yellow zephyr amber bottle"
)
WORDS = tuple(_TEXT.split())
TRACE_BLOCK_TOKENS = 512
"""Tokens that one ``hash_id`` of a trace stands for."""


@dataclass(frozen=True, slots=True)
class Turn:
    """One question.

    Attributes:
        text: of the user's message.
        max_tokens: longest answer.
    """

    text: str
    max_tokens: int


@dataclass(frozen=True, slots=True)
class Session:
    """One conversation: each turn is asked when the answer to the one before is complete.

    Attributes:
        turns: in order.
        system: what comes before the first; sessions with the same one share it.
        start_s: earliest start, seconds from the beginning of the run.
    """

    turns: tuple[Turn, ...]
    system: str = ""
    start_s: float = 0.0


@dataclass(frozen=True, slots=True)
class ChatShape:
    """How made-up conversations look.

    Attributes:
        sessions: how many.
        turns: questions in each.
        prompt_words: of each question.
        output_tokens: longest answer.
        shared_words: of a system prompt, the same for all sessions of a group.
        groups: different system prompts.
        seed: the same conversations every time.
    """

    sessions: int
    turns: int
    prompt_words: int
    output_tokens: int
    shared_words: int = 0
    groups: int = 1
    seed: int = 0


def chats(shape: ChatShape) -> list[Session]:
    """Conversations of one shape, all ready to start at once."""
    systems = [_words(f"{shape.seed}/system {group}", shape.shared_words) for group in range(shape.groups)]
    return [
        Session(
            tuple(
                Turn(_words(f"{shape.seed}/{number}/{turn}", shape.prompt_words), shape.output_tokens)
                for turn in range(shape.turns)
            ),
            systems[number % shape.groups],
        )
        for number in range(shape.sessions)
    ]


@dataclass(slots=True)
class TraceReader:
    """Reads a trace of JSON lines with ``timestamp`` (ms), ``output_length`` and ``hash_ids`` (the Mooncake format).

    A block's text follows from its hash, so requests share what they shared when the trace was taken.

    Attributes:
        path: of the trace.
        limit: requests to read.
        speed: 2 means twice as fast as recorded.
        words_per_block: words that stand for ``TRACE_BLOCK_TOKENS`` tokens; fewer make a lighter load.
        max_output_tokens: longest answer.
    """

    path: Path
    limit: int
    speed: float = 1.0
    words_per_block: int = TRACE_BLOCK_TOKENS
    max_output_tokens: int = TRACE_BLOCK_TOKENS
    _blocks: dict[int, str] = field(default_factory=dict)

    def sessions(self) -> list[Session]:
        """One session of one turn for each request, in the order of the file.

        Raises:
            TraceError: the file or a line cannot be read.
        """
        try:
            lines = [line for line in self.path.read_text(encoding="utf-8").splitlines() if line.strip()]
        except (OSError, UnicodeDecodeError) as error:
            raise TraceError(f"cannot read {self.path}: {error}") from error
        found = [self._session(number, line) for number, line in enumerate(lines[: self.limit], 1)]
        first = min((session.start_s for session in found), default=0.0)
        return [Session(one.turns, one.system, one.start_s - first) for one in found]

    def _session(self, number: int, line: str) -> Session:
        try:
            row = json.loads(line)
            text = " ".join(self._block(int(block)) for block in row["hash_ids"])
            output = max(1, min(int(row["output_length"]), self.max_output_tokens))
            return Session((Turn(text, output),), start_s=float(row["timestamp"]) / 1000 / self.speed)
        except (ValueError, TypeError, KeyError) as error:
            raise TraceError(
                f"{self.path}, line {number}: {error!r}; expected timestamp, output_length, hash_ids"
            ) from error

    def _block(self, block: int) -> str:
        if block not in self._blocks:
            self._blocks[block] = _words(f"block {block}", self.words_per_block)
        return self._blocks[block]


def _words(seed: str, count: int) -> str:
    return " ".join(random.Random(seed).choices(WORDS, k=count))
