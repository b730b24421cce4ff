from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from tests.replay.running import events_of

from dflash2.errors import TraceError
from dflash2.policy.base import Outcome
from dflash2.replay.events import Arrival, Event, Finish, Timing
from dflash2.replay.readers import read_events
from dflash2.replay.source import open_source


def line(at_ms: int, blocks: list[Any], output: int = 40, **more: Any) -> str:
    whole = {"timestamp": at_ms, "input_length": 512 * len(blocks), "output_length": output, "hash_ids": blocks, **more}
    return json.dumps(whole) + "\n"


def arrivals(events: list[Event]) -> list[Arrival]:
    return [event for event in events if isinstance(event, Arrival)]


def order(events: list[Event]) -> list[tuple[str, int]]:
    return [("arrival" if isinstance(event, Arrival) else "finish", event.number) for event in events]


def test_an_outcome_is_told_at_its_time_and_not_before() -> None:
    """Chats end 1 s + output / 40 s after they arrive: here after 2 s."""
    events = list(events_of(line(5000, [7]) + line(6999, [7, 8]) + line(7000, [9])))
    assert order(events) == [
        *[("arrival", 0), ("arrival", 1), ("finish", 0), ("arrival", 2)],
        *[("finish", 1), ("finish", 2)],
    ]
    assert [event.at_s for event in events] == [0.0, 1.999, 2.0, 2.0, 3.999, 4.0]
    assert [one.blocks.tolist() for one in arrivals(events)] == [[0], [0, 1], [2]]


def test_agents_end_later_and_say_how() -> None:
    first, last = events_of(
        line(0, [1], 70, session_id="s", input_kinds=["text"], stop_reason="tool_use"),
    )
    assert isinstance(first, Arrival) and isinstance(last, Finish)
    assert first.traits.session == "s" and first.traits.input_kinds == ("text",)
    assert last.at_s == 2.5 and last.outcome == Outcome("tool_use", 70)


def test_nothing_is_read_before_it_has_to_be() -> None:
    """A line that cannot be read is only met when all before it has been dealt with."""
    events = events_of(line(0, [1]) + line(9000, [1]) + "nonsense\n")
    assert order([next(events) for _ in range(3)]) == [("arrival", 0), ("finish", 0), ("arrival", 1)]
    with pytest.raises(TraceError, match="line 3: not JSON"):
        next(events)


def test_no_two_requests_arrive_at_the_same_instant() -> None:
    times = [event.at_s for event in events_of(line(3000, [1]) + line(3000, [2]) + line(2000, [3]))]
    assert times[0] == 0.0 and times[:3] == sorted(set(times[:3])) and times[2] < 0.001


def test_a_block_that_is_not_full_is_marked() -> None:
    partial = json.loads(line(0, [1, 2])) | {"input_length": 600}
    (first, *_) = events_of(json.dumps(partial))
    assert isinstance(first, Arrival) and first.traits.partial_tail
    assert first.traits.num_prompt_tokens == 600


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[1]\n", "not a JSON object"),
        ('{"timestamp": 0}\n', "hash_ids is missing"),
        (line(0, [1]) + line(1, [2, 2]), "line 2: hash_ids names a block twice"),
        ('{"event": "arrive"}\n', "an event 'arrive' is not known"),
        ('{"event": "start"}\n', "block_size is missing"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16,1\n", "line 2: not TIMESTAMP"),
    ],
)
def test_what_cannot_be_read_is_named(text: str, message: str) -> None:
    with pytest.raises(TraceError, match=message):
        list(events_of(text))


def test_an_empty_trace_has_no_events() -> None:
    assert list(events_of("\n")) == []


def test_lengths_only() -> None:
    text = (
        "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03.9799600,600,10\n2023-11-16 18:17:04.0319600,512,8"
    )
    first, second = arrivals(list(events_of(text)))
    assert first.blocks.tolist() == [0, 1] and second.blocks.tolist() == [2]
    assert second.at_s == pytest.approx(0.052) and first.traits.partial_tail and not second.traits.partial_tail


def test_a_recording_tells_its_own_times() -> None:
    start = {"event": "start", "block_size": 128}
    arrival = {"event": "arrival", "timestamp": 1000, "request": "a", "input_length": 300, "hash_ids": [91, 17]}
    finish = {"event": "finish", "timestamp": 4000, "request": "a", "output_length": 5, "stop_reason": "stop"}
    lost = arrival | {"request": "b", "timestamp": 5000, "session_id": "s"}
    late = finish | {"request": "b", "timestamp": 9000}
    text = "".join(json.dumps(event) + "\n" for event in (start, arrival, finish, lost, start, late))
    events = list(events_of(text))
    assert order(events) == [("arrival", 0), ("finish", 0), ("arrival", 1)]
    assert [event.at_s for event in events] == [0.0, 3.0, 4.0]
    assert arrivals(events)[0].block_tokens == 128 and not arrivals(events)[0].traits.partial_tail


def test_compressed_files_and_progress(tmp_path: Path) -> None:
    text = line(0, [1]) + line(1, [1, 2])
    plain, packed = tmp_path / "t.jsonl", tmp_path / "t.jsonl.gz"
    plain.write_text(text)
    packed.write_bytes(gzip.compress(text.encode()))
    for path in (plain, packed):
        with open_source(str(path)) as source:
            assert len(list(read_events(source))) == 4
            assert source.read_bytes == source.total_bytes == path.stat().st_size
    packed.write_bytes(gzip.compress(text.encode())[:-9])
    with open_source(str(packed)) as source, pytest.raises(TraceError, match="cannot be read"):
        list(read_events(source))


def test_a_trace_that_is_not_there() -> None:
    with pytest.raises(TraceError, match="cannot open"), open_source("/nowhere/t.jsonl"):
        pass


def test_a_profile_may_give_the_pace() -> None:
    assert Timing(0.5, 100).end_s(10.0, 50) == 11.0
