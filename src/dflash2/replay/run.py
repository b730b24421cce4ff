"""The replay itself: every event goes to every policy, one after the other."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

from dflash2.replay.caches import Replayed
from dflash2.replay.events import Arrival, Event


def first_requests(events: Iterable[Event], count: int | None) -> Iterator[Event]:
    """The events before the arrival of request number ``count``; all of them for None."""
    for event in events:
        if count is not None and isinstance(event, Arrival) and event.number >= count:
            return
        yield event


def replay(
    events: Iterable[Event], replayed: Sequence[Replayed], on_request: Callable[[], None] = lambda: None
) -> None:
    """Feed a trace to all of ``replayed``.

    Args:
        events: in the order of time.
        replayed: policies at their sizes.
        on_request: called after each request, for a progress bar.
    """
    for event in events:
        if isinstance(event, Arrival):
            for one in replayed:
                one.arrive(event)
            on_request()
        else:
            for one in replayed:
                one.finish(event)
