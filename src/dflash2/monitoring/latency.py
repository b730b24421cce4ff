"""How long requests wait: histograms of queue time, time to first token and time per output token."""

from __future__ import annotations

from bisect import bisect_left

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
    """Told by an engine what happens to its requests. All times on one clock."""

    def __init__(self) -> None:
        self.queue, self.ttft, self.tpot = Histogram(), Histogram(), Histogram()
        self._first_token_s: dict[str, float] = {}
        self._begun: set[str] = set()

    def on_step(self, request_id: str, arrival_s: float, now: float) -> None:
        """A step computes for the request; the first one ends its time in the queue."""
        if request_id not in self._begun:
            self._begun.add(request_id)
            self.queue.observe(now - arrival_s)

    def on_token(self, request_id: str, arrival_s: float, now: float) -> None:
        """The request has one more token."""
        if request_id not in self._first_token_s:
            self._first_token_s[request_id] = now
            self.ttft.observe(now - arrival_s)

    def on_end(self, request_id: str, num_tokens: int, now: float) -> None:
        """The request is over, with so many output tokens."""
        self._begun.discard(request_id)
        first = self._first_token_s.pop(request_id, None)
        if first is not None and num_tokens > 1:
            self.tpot.observe((now - first) / (num_tokens - 1))

    def as_dict(self) -> dict[str, dict[str, float]]:
        """As JSON."""
        return {"queue": self.queue.as_dict(), "ttft": self.ttft.as_dict(), "tpot": self.tpot.as_dict()}
