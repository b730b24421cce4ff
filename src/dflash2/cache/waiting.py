"""The order in which requests wait: short ones need not stand behind long ones, and no one starves (R-1.2)."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Protocol, TypeVar

SHORT_SHARE = 8
"""A request is short beside others if it has at most one part in so many of their tokens' usual size."""
OVERTAKING = 1
"""Tokens of others that may pass a waiting request, per token of its own."""


class InLine(Protocol):
    """What the line looks at.

    Attributes:
        size_tokens: prompt and expected answer together.
        overtaken_tokens: size of those that came later and went ahead.
        priority: smaller goes first.
    """

    @property
    def size_tokens(self) -> int: ...

    @property
    def priority(self) -> int: ...

    overtaken_tokens: int


T = TypeVar("T", bound=InLine)


def length_class(num_tokens: int) -> int:
    """Requests of one class are at most a factor of two apart."""
    return num_tokens.bit_length()


def short_beside(sizes: Iterable[int]) -> int:
    """Tokens that a request has at most which is short beside requests of these sizes.

    Measured by the size of the request that a token picked at random belongs to: a few long ones, which make others
    wait, count, however many short ones there are; and where all are alike nobody is short.
    """
    sizes = list(sizes)
    return sum(size * size for size in sizes) // (SHORT_SHARE * sum(sizes)) if sizes else 0


def join(line: deque[T], new: T) -> None:
    """Let a request take its place.

    It goes ahead of those of a higher length class, but each request lets only as many tokens pass as it has itself:
    so every request is delayed by no more than its own size, however many come later. Among equals, and for those that
    have let enough pass, who came first goes first. A request of higher priority goes ahead of all of lower priority.
    """
    place = len(line)
    while place and _may_pass(new, line[place - 1]):
        place -= 1
        line[place].overtaken_tokens += new.size_tokens
    line.insert(place, new)


def _may_pass(new: InLine, ahead: InLine) -> bool:
    if new.priority != ahead.priority:
        return new.priority < ahead.priority
    shorter = length_class(new.size_tokens) < length_class(ahead.size_tokens)
    return shorter and ahead.overtaken_tokens + new.size_tokens <= OVERTAKING * ahead.size_tokens
