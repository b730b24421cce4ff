"""What a replay sees of recorded traffic, in the order in which a server would have seen it."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TypeAlias

from dflash2.policy.base import Outcome, RequestTraits
from dflash2.types import IntArray


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request arrives.

    Attributes:
        number: counts the requests of the trace from 0.
        at_s: seconds since the first request.
        blocks: int32 ``[n]``, distinct: the prompt's blocks in order. The same number is the same content after the
            same prefix; numbers are given in the order of first appearance.
        block_tokens: tokens of a full block.
        traits: what a server knows of a request when it arrives.
    """

    number: int
    at_s: float
    blocks: IntArray
    block_tokens: int
    traits: RequestTraits


@dataclass(frozen=True, slots=True)
class Finish:
    """A request has ended: only now is known how, and how much it produced."""

    number: int
    at_s: float
    outcome: Outcome


Event: TypeAlias = Arrival | Finish


@dataclass(frozen=True, slots=True)
class Timing:
    """When a request ends of which a trace says only how many tokens it produced.

    Attributes:
        first_s: from arrival to the first token.
        tokens_per_s: pace of the output after that.
    """

    first_s: float
    tokens_per_s: float

    def end_s(self, arrival_s: float, num_output_tokens: int) -> float:
        return arrival_s + self.first_s + num_output_tokens / self.tokens_per_s


AGENT_TIMING = Timing(1.5, 70.0)
"""For requests of agents: long cached prompts on a fast model."""
CHAT_TIMING = Timing(1.0, 40.0)


@dataclass(frozen=True, slots=True)
class Recorded:
    """One line of a trace that tells a request's beginning and end at once."""

    arrival: Arrival
    finish: Finish


def in_order(recorded: Iterable[Recorded]) -> Iterator[Event]:
    """Arrivals as they come, and every end in its place among them: nothing is told before its time.

    Of events at the same time ends come first. A line is read only when all events before it have been taken.
    """
    running: list[tuple[float, int, Finish]] = []
    for line in recorded:
        while running and running[0][0] <= line.arrival.at_s:
            yield heapq.heappop(running)[2]
        heapq.heappush(running, (line.finish.at_s, line.finish.number, line.finish))
        yield line.arrival
    while running:
        yield heapq.heappop(running)[2]
