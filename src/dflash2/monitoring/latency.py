"""How long requests wait: histograms of queue time, time to first token and time per output token."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable

BOUNDS_S = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0)
"""Upper ends of the buckets."""


class Histogram:
    """Observations in seconds, counted by size."""

    def __init__(self) -> None:
        self._counts = [0] * (len(BOUNDS_S) + 1)
        self._sum_s = 0.0

    def observe(self, seconds: float) -> None:
        self._counts[bisect_left(BOUNDS_S, seconds)] += 1
        self._sum_s += seconds

    def as_dict(self) -> dict[str, float]:
        """``le_{bound}``: observations up to the bound; ``count`` and ``sum_s``."""
        values: dict[str, float] = {}
        total = 0
        for bound, count in zip(BOUNDS_S, self._counts, strict=False):
            total += count
            values[f"le_{bound:g}"] = total
        return {**values, "count": total + self._counts[-1], "sum_s": self._sum_s}


class RequestLatencies:
    """Told by an engine what happens to its requests and to the branches (answers) of each. All times on one clock."""

    def __init__(self) -> None:
        self.queue, self.ttft, self.tpot = Histogram(), Histogram(), Histogram()
        self._arrived_s: dict[str, float] = {}
        self._queued: set[str] = set()
        self._branches: dict[str, dict[int, tuple[float, int]]] = {}
        """Per request and branch: time of the first token, and number of tokens."""

    def on_arrival(self, request_id: str, arrival_s: float) -> None:
        """The request arrived then, before it was tokenised."""
        self._arrived_s[request_id] = arrival_s
        self._queued.add(request_id)
        self._branches[request_id] = {}

    def on_step(self, request_ids: Iterable[str], now: float) -> None:
        """A step begins that computes for these; the first one ends a request's time in the queue."""
        for request_id in request_ids:
            if request_id in self._queued:
                self._queued.remove(request_id)
                self.queue.observe(now - self._arrived_s[request_id])

    def on_token(self, request_id: str, branch: int, now: float) -> None:
        """A branch has one more token."""
        branches = self._branches[request_id]
        if not branches:
            self.ttft.observe(now - self._arrived_s[request_id])
        first, count = branches.get(branch, (now, 0))
        branches[branch] = (first, count + 1)

    def on_branch_end(self, request_id: str, branch: int, now: float) -> None:
        """A branch has got its last token."""
        first, count = self._branches[request_id].get(branch, (now, 0))
        if count > 1:
            self.tpot.observe((now - first) / (count - 1))

    def on_end(self, request_id: str) -> None:
        """Nothing follows for the request."""
        del self._arrived_s[request_id], self._branches[request_id]
        self._queued.discard(request_id)

    def as_dict(self) -> dict[str, dict[str, float]]:
        """As JSON."""
        return {"queue": self.queue.as_dict(), "ttft": self.ttft.as_dict(), "tpot": self.tpot.as_dict()}
