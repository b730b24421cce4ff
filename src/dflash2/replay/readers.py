"""From the lines of a trace to events, for every format that is understood.

* JSON lines with ``timestamp`` (ms), ``input_length``, ``output_length``, ``hash_ids`` (one per block of 512 tokens,
  chained over the prefix): the format of the Mooncake traces, and with ``session_id``, ``input_kinds`` and
  ``stop_reason`` that of agent traces.
* JSON lines of ``dflash2 serve --record``: see ``dflash2.monitoring.recording``.
* CSV with ``TIMESTAMP,ContextTokens,GeneratedTokens``: the Azure traces. They tell lengths only, so no block
  is used twice.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Hashable, Iterable, Iterator
from datetime import datetime
from typing import Any

import numpy as np

from dflash2.policy.base import Outcome, RequestTraits
from dflash2.replay.events import AGENT_TIMING, CHAT_TIMING, Arrival, Event, Finish, Recorded, Timing, in_order
from dflash2.replay.source import LineSource
from dflash2.types import IntArray

TRACE_BLOCK_TOKENS = 512
TICK_S = 1e-6
CSV_COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")


class Numbering:
    """Gives blocks numbers in the order of their first appearance."""

    def __init__(self) -> None:
        self._numbers: dict[Hashable, int] = {}

    def of(self, names: Iterable[Hashable]) -> IntArray:
        numbers = self._numbers
        return np.array([numbers.setdefault(name, len(numbers)) for name in names], np.int32)

    def fresh(self, count: int) -> IntArray:
        """So many blocks that nobody has seen or will see again."""
        first = len(self._numbers)
        return self.of(("fresh", number) for number in range(first, first + count))


def read_events(source: LineSource, timing: Timing | None = None) -> Iterator[Event]:
    """Events of a trace in the order of time; its first line tells the format.

    Args:
        source: the lines.
        timing: when requests end where the trace does not say; by default ``AGENT_TIMING`` for requests with a session
            or a stop reason and ``CHAT_TIMING`` for others.

    Raises (while iterating):
        TraceError: a line cannot be understood; it is named.
    """
    lines = iter(source)
    first = next(lines, None)
    if first is None:
        return
    every = itertools.chain([first], lines)
    if first.startswith("TIMESTAMP"):
        yield from in_order(_read_csv(source, every, timing or CHAT_TIMING))
        return
    objects = _parse(source, every)
    head = next(objects)
    objects = itertools.chain([head], objects)
    if "event" in head:
        yield from _read_recording(source, objects)
    else:
        yield from in_order(_read_requests(source, objects, timing))


def _parse(source: LineSource, lines: Iterable[str]) -> Iterator[dict[str, Any]]:
    for line in lines:
        try:
            value = json.loads(line)
        except ValueError as error:
            raise source.error(f"not JSON ({error})") from error
        if not isinstance(value, dict):
            raise source.error("not a JSON object")
        yield value


def _read_requests(source: LineSource, objects: Iterable[dict[str, Any]], timing: Timing | None) -> Iterator[Recorded]:
    numbering = Numbering()
    clock = Clock()
    for number, line in enumerate(objects):
        try:
            at_s = clock.seconds(line["timestamp"])
            blocks = numbering.of(line["hash_ids"])
            num_output = int(line["output_length"])
            traits = _traits(line, TRACE_BLOCK_TOKENS, len(blocks))
        except (KeyError, TypeError, ValueError) as error:
            raise source.error(f"not a request ({_reason(error)})") from error
        _check_distinct(source, blocks)
        by_agent = "session_id" in line or "stop_reason" in line
        chosen = timing or (AGENT_TIMING if by_agent else CHAT_TIMING)
        outcome = Outcome(line.get("stop_reason"), num_output)
        yield Recorded(
            Arrival(number, at_s, blocks, TRACE_BLOCK_TOKENS, traits),
            Finish(number, chosen.end_s(at_s, num_output), outcome),
        )


def _read_recording(source: LineSource, objects: Iterable[dict[str, Any]]) -> Iterator[Event]:
    """A server's own log: what happened, when it happened."""
    numbering = Numbering()
    clock = Clock()
    numbers: dict[str, int] = {}
    block_tokens = TRACE_BLOCK_TOKENS
    arrived = 0
    for line in objects:
        try:
            event = line["event"]
            if event == "start":
                block_tokens = int(line["block_size"])
                numbers.clear()  # requests of an earlier run that were never told to have ended
            elif event == "arrival":
                blocks = numbering.of(line["hash_ids"])
                _check_distinct(source, blocks)
                numbers[line["request"]] = arrived
                traits = _traits(line, block_tokens, len(blocks))
                yield Arrival(arrived, clock.seconds(line["timestamp"]), blocks, block_tokens, traits)
                arrived += 1
            elif event == "finish":
                number = numbers.pop(line["request"], None)
                outcome = Outcome(line["stop_reason"], int(line["output_length"]))
                if number is not None:
                    yield Finish(number, clock.seconds(line["timestamp"]), outcome)
            else:
                raise source.error(f"an event {event!r} is not known")
        except (KeyError, TypeError, ValueError) as error:
            raise source.error(f"not an event of a recording ({_reason(error)})") from error


def _read_csv(source: LineSource, lines: Iterable[str], timing: Timing) -> Iterator[Recorded]:
    numbering = Numbering()
    clock = Clock()
    for number, line in enumerate(itertools.islice(lines, 1, None)):
        try:
            when, prompt, output = line.split(",")
            # Seven digits of a second are more than Python 3.10 takes.
            at_s = clock.seconds(datetime.fromisoformat(when[:26]).timestamp() * 1e3)
            num_prompt, num_output = int(prompt), int(output)
        except ValueError as error:
            raise source.error(f"not {','.join(CSV_COLUMNS)} ({error})") from error
        blocks = numbering.fresh(-(-num_prompt // TRACE_BLOCK_TOKENS))
        traits = RequestTraits(num_prompt_tokens=num_prompt, partial_tail=num_prompt % TRACE_BLOCK_TOKENS != 0)
        yield Recorded(
            Arrival(number, at_s, blocks, TRACE_BLOCK_TOKENS, traits),
            Finish(number, timing.end_s(at_s, num_output), Outcome(None, num_output)),
        )


class Clock:
    """Milliseconds of a trace to seconds since its first event.

    No two events happen at the same time: in a server none do, and what is the least recently used must be clear.
    """

    def __init__(self) -> None:
        self._first: float | None = None
        self._now = -TICK_S

    def seconds(self, timestamp_ms: float) -> float:
        milliseconds = float(timestamp_ms)
        if self._first is None:
            self._first = milliseconds
        self._now = max(self._now + TICK_S, (milliseconds - self._first) / 1e3)
        return self._now


def _traits(line: dict[str, Any], block_tokens: int, num_blocks: int) -> RequestTraits:
    num_prompt = int(line["input_length"])
    session = line.get("session_id")
    return RequestTraits(
        session=None if session is None else str(session),
        input_kinds=tuple(line.get("input_kinds") or ()),
        num_prompt_tokens=num_prompt,
        partial_tail=num_blocks * block_tokens > num_prompt,
    )


def _check_distinct(source: LineSource, blocks: IntArray) -> None:
    if len(np.unique(blocks)) != len(blocks):
        raise source.error("hash_ids names a block twice; they must be chained over the prefix")


def _reason(error: Exception) -> str:
    return f"{error.args[0]} is missing" if isinstance(error, KeyError) else str(error)
