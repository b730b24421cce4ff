"""Conversations, sent by several clients at once, and whether the answers are those of plain SGLang."""

from __future__ import annotations

import random
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from tests.sglang.server import Server

TIE = 1e-3
"""Two best candidates nearer than this may change places by rounding alone."""


@dataclass(slots=True)
class Turn:
    """One request, and what plain SGLang answers.

    Attributes:
        prompt: token ids.
        output: token ids.
        gaps: for each output token the difference of the two best log-probabilities.
    """

    prompt: list[int]
    output: list[int]
    gaps: list[float]


@dataclass(slots=True)
class Traffic:
    """What a server answered, against the reference."""

    host_tokens: int = 0
    """Cached tokens that came from below the device."""
    cached_tokens: int = 0
    num_tokens: int = 0
    ties: int = 0
    wrong: list[str] = field(default_factory=list)

    def note(self, answer: dict[str, Any], turn: Turn) -> None:
        """Compare one answer."""
        details = answer["meta_info"].get("cached_tokens_details") or {}
        self.cached_tokens += answer["meta_info"]["cached_tokens"]
        self.host_tokens += details.get("host", 0)
        self.num_tokens += len(turn.output)
        got = answer["output_ids"]
        if got == turn.output:
            return
        at = next(i for i, (a, b) in enumerate(zip(got, turn.output, strict=True)) if a != b)
        if turn.gaps[at] < TIE:
            self.ties += 1
        else:
            self.wrong.append(f"token {at}: {got[at]} for {turn.output[at]}, gap {turn.gaps[at]:.4f}, {details}")


class Conversations:
    """Several chats; all first turns before all second ones, so that a chat returns when others have used its room.

    The order changes with each turn: some return soon and find their KV in DRAM, others late.

    Args:
        server: plain SGLang, asked for the answers to compare with.
        num_chats, num_turns: each turn is a request with everything before it in its prompt.
        prompt_tokens: of the first turn, one to two times as many; later turns add a few.
        num_new: tokens of each answer.
        at_once: clients.
    """

    def __init__(
        self, server: Server, num_chats: int, num_turns: int, prompt_tokens: int, num_new: int, at_once: int
    ) -> None:
        self.num_new = num_new
        self.turns: list[list[Turn]] = []
        rng = random.Random(7)
        prompts = [_text(rng, rng.randrange(prompt_tokens, 2 * prompt_tokens)) for _ in range(num_chats)]
        for _ in range(num_turns):
            with ThreadPoolExecutor(at_once) as clients:
                answers = list(clients.map(lambda prompt: server.generate(prompt, num_new), prompts))
            self.turns.append([_turn(prompt, answer) for prompt, answer in zip(prompts, answers, strict=True)])
            prompts = [turn.prompt + turn.output + _text(rng, 24) for turn in self.turns[-1]]
            rng.shuffle(prompts)

    @property
    def last(self) -> list[Turn]:
        """The last turn of each chat."""
        return self.turns[-1]

    def replay(self, server: Server, at_once: int) -> Traffic:
        """Send all of it again."""
        seen = Traffic()
        for turns in self.turns:
            self.send(server, turns, at_once, seen)
        return seen

    def send(self, server: Server, turns: Iterable[Turn], at_once: int, seen: Traffic | None = None) -> Traffic:
        """Send some of it again."""
        seen = Traffic() if seen is None else seen
        turns = list(turns)
        with ThreadPoolExecutor(at_once) as clients:
            answers = list(clients.map(lambda turn: server.generate(turn.prompt, self.num_new), turns))
        for answer, turn in zip(answers, turns, strict=True):
            seen.note(answer, turn)
        return seen


def _turn(prompt: list[int], answer: dict[str, Any]) -> Turn:
    best = answer["meta_info"]["output_top_logprobs"]
    return Turn(prompt, answer["output_ids"], [position[0][0] - position[1][0] for position in best])


def _text(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(1000, 40000) for _ in range(count)]
