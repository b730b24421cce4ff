"""Where a request joins SGLang's queue: one with little left to compute need not stand behind one with much (R-1.2)."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from dflash2.cache.waiting import join


@dataclass(slots=True, eq=False)
class _Place:
    """See ``cache.waiting.InLine``."""

    size_tokens: int
    overtaken_tokens: int = 0
    priority: int = 0


class QueueOrder:
    """The line of ``cache.waiting`` over the requests that SGLang has waiting.

    A turn of a conversation whose KV is cached keeps others waiting for the few tokens that are new, not for its whole
    prompt: this is its size. All ranks must give the same sizes in the same order.
    """

    def __init__(self) -> None:
        self._places: dict[str, _Place] = {}

    def join(self, waiting: Sequence[str], rid: str, size_tokens: int) -> int:
        """A request joins the queue.

        Args:
            waiting: those that wait, in order. Nobody goes ahead of one that never joined.
            rid: the new one.
            size_tokens: what it has to compute before its next token.

        Returns:
            Its index among them.
        """
        line = deque(self._places.get(other) or _Place(0) for other in waiting)
        new = self._places[rid] = _Place(size_tokens)
        join(line, new)
        return line.index(new)

    def leave(self, rid: str) -> None:
        """It waits no longer. Idempotent."""
        self._places.pop(rid, None)
