"""What a scheduler keeps to, and what it counts."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    """Bounds of a step and of the waits."""

    max_batch_tokens: int
    max_running: int
    quantum_tokens: int
    """Decode steps for which a resident request keeps its place while others wait for it."""
    admission_timeout_s: float
    load_timeout_s: float = 30.0
    """A request whose blocks have not arrived in HBM by then recomputes what is missing."""
    max_waiting: int = 1024
    """Requests that may wait for admission."""
    short_first: bool = True
    """Short requests need not wait behind long ones; False for first come, first served."""
    arrival_prefetch: bool = True
    """What is cached of a waiting request's prompt is brought nearer while it waits."""


@dataclass(slots=True)
class SchedulerCounters:
    """What the scheduler did since its start."""

    admitted_requests: int = 0
    timed_out_requests: int = 0
    preemptions_swapped: int = 0
    preemptions_recomputed: int = 0
    unplanned_swaps: int = 0
    """Of the swapped: in the middle of a turn."""
    growth_waits: int = 0
    """Times that an admitted request had to wait because its reservation could not be extended."""
    refused_requests: int = 0
    """Requests that found the queue full."""
    load_timeouts: int = 0
    peak_running_tokens: int = 0
    """Most tokens whose KV unfinished requests held at one time, on all tiers."""
