"""The replay itself: every event goes to every policy, one after the other."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from dflash2.replay.caches import Replayed
from dflash2.replay.events import Arrival, Event


def replay(
    events: Iterable[Event],
    replayed: Sequence[Replayed],
    upto: int | None = None,
    on_request: Callable[[], None] = lambda: None,
) -> int:
    """Feed a trace to all of ``replayed``.

    Args:
        events: in the order of time.
        replayed: policies at their sizes.
        upto: stop before the request with this number; None: at the end of the trace.
        on_request: called after each request, for a progress bar.

    Returns:
        Requests replayed.
    """
    count = 0
    for event in events:
        if isinstance(event, Arrival):
            if upto is not None and count >= upto:
                break
            for one in replayed:
                one.arrive(event)
            count += 1
            on_request()
        else:
            for one in replayed:
                one.finish(event)
    return count
