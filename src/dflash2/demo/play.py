"""Plays all chats against one engine and measures."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from dflash2.demo.workload import Chat
from dflash2.engine.base import FinishReason, GenerationRequest, TokenOutput
from dflash2.engine.engine import ReferenceEngine
from dflash2.engine.sampling import SamplingParams
from dflash2.errors import DFlash2Error
from dflash2.types import IntArray


@dataclass(slots=True)
class Transcript:
    """What one setting answered, and how fast.

    Attributes:
        answers: token ids of each answer, by (chat, turn).
        gaps: distance of the two best logits behind each token of an answer.
        ttft_s: time to first token of each answer.
        wall_s: from the first request to the last token.
    """

    answers: dict[tuple[int, int], list[int]] = field(default_factory=dict)
    gaps: dict[tuple[int, int], list[float]] = field(default_factory=dict)
    ttft_s: list[float] = field(default_factory=list)
    wall_s: float = 0.0

    @property
    def num_output_tokens(self) -> int:
        return sum(map(len, self.answers.values()))


class Player:
    """All users at once; each asks the next question as soon as the answer is complete.

    Args:
        engine: owned by the caller.
        chats: conversations.
        output_tokens: exact length of each answer.
        on_token: called for every token, for progress.
    """

    def __init__(
        self, engine: ReferenceEngine, chats: list[Chat], output_tokens: int, on_token: Callable[[], None]
    ) -> None:
        self._engine = engine
        self._chats = chats
        self._sampling = SamplingParams(max_tokens=output_tokens, temperature=0.0, ignore_eos=True)
        self._on_token = on_token
        self._transcript = Transcript()
        self._prompts: dict[int, IntArray] = {}
        self._arrival_s: dict[tuple[int, int], float] = {}

    def play(self) -> Transcript:
        """Run to the end.

        Raises:
            DFlash2Error: a request failed.
        """
        start = time.perf_counter()
        self._engine.on_gaps = self._note_gaps
        for number, chat in enumerate(self._chats):
            self._ask(number, 0, chat.opening)
        while self._engine.has_work:
            for output in self._engine.step():
                self._take(output)
        self._transcript.wall_s = time.perf_counter() - start
        return self._transcript

    def _ask(self, number: int, turn: int, prompt: IntArray) -> None:
        self._prompts[number] = prompt
        self._transcript.answers[number, turn] = []
        self._transcript.gaps[number, turn] = []
        self._arrival_s[number, turn] = time.perf_counter()
        request_id = f"{number}/{turn}"
        self._engine.add(GenerationRequest(request_id, prompt, self._sampling, self._engine.runtime.clock()))

    def _take(self, output: TokenOutput) -> None:
        number, turn = _parse(output.request_id)
        if output.token_id is None:
            raise output.error or DFlash2Error(f"request {output.request_id} ended: {output.finish_reason}")
        answer = self._transcript.answers[number, turn]
        if not answer:
            self._transcript.ttft_s.append(time.perf_counter() - self._arrival_s[number, turn])
        answer.append(output.token_id)
        self._on_token()
        chat = self._chats[number]
        if output.finish_reason is FinishReason.LENGTH and turn + 1 < chat.num_turns:
            so_far = (self._prompts[number], np.array(answer, np.int32), chat.follow_ups[turn])
            self._ask(number, turn + 1, np.concatenate(so_far))

    def _note_gaps(self, request_ids: list[str], gaps: list[float]) -> None:
        for request_id, gap in zip(request_ids, gaps, strict=True):
            self._transcript.gaps[_parse(request_id)].append(gap)


def _parse(request_id: str) -> tuple[int, int]:
    number, turn = request_id.split("/")
    return int(number), int(turn)
