from __future__ import annotations

import json
import logging
import os
import stat
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.fakes.clock import ManualClock

from dflash2.errors import StorageError
from dflash2.monitoring.recording import TrafficRecorder

PROMPT = np.arange(100, 111, dtype=np.int32)


def events(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def recorder(path: Path) -> TrafficRecorder:
    return TrafficRecorder(path, block_size=4, clock=ManualClock())


def test_what_is_written(tmp_path: Path) -> None:
    path = tmp_path / "traffic.jsonl"
    recording = recorder(path)
    recording.arrival("a", PROMPT, (None, None), "ann's chat")
    recording.finish("a", 7, "stop")
    start, arrival, finish = events(path)
    assert start == {"event": "start", "format": 1, "block_size": 4}
    assert arrival["event"] == "arrival" and arrival["request"] == "a" and arrival["input_length"] == 11
    assert len(arrival["hash_ids"]) == 2  # the last three tokens fill no block
    assert finish["output_length"] == 7 and finish["stop_reason"] == "stop"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert "ann" not in path.read_text()
    recording.close()


def test_the_same_prefix_has_the_same_hashes_and_nothing_else_has(tmp_path: Path) -> None:
    path = tmp_path / "traffic.jsonl"
    recording = recorder(path)
    longer = np.concatenate([PROMPT[:8], PROMPT[:4]])
    for prompt, scope in (
        (PROMPT, (None, None)),
        (longer, (None, None)),
        (PROMPT, ("adapter", None)),
        (PROMPT[4:], ()),
    ):
        recording.arrival("r", prompt, scope, None)
    recording.close()
    first, second, other_scope, other_place = (event["hash_ids"] for event in events(path)[1:])
    assert second[:2] == first and second[2] != first[0]
    assert not set(first) & set(other_scope) and not set(first) & set(other_place)


def test_two_starts_share_no_hash_and_a_file_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "traffic.jsonl"
    for _ in range(2):
        recording = recorder(path)
        recording.arrival("r", PROMPT, (None, None), "s")
        recording.close()
        recording.close()
    _, first, _, second = events(path)
    assert not set(first["hash_ids"]) & set(second["hash_ids"]) and first["session_id"] != second["session_id"]


def test_a_file_that_cannot_be_opened_is_an_error_at_start(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="cannot record traffic"):
        recorder(tmp_path)


def test_a_disk_that_is_full_is_an_error_at_start() -> None:
    full = Path("/dev/full")
    if not full.exists():
        pytest.skip("no /dev/full here")
    with pytest.raises(StorageError, match="No space left"):
        recorder(full)


def test_a_disk_that_fills_up_later_ends_the_recording_only(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "traffic.jsonl"
    recording = recorder(path)
    recording.finish("a", 1, "stop")

    monkeypatch.setattr(os, "write", lambda descriptor, line: len(line) - 1)
    with caplog.at_level(logging.ERROR):
        recording.finish("b", 1, "stop")
        recording.finish("c", 1, "stop")
    assert [record.getMessage() for record in caplog.records] == [
        f"recording of traffic to {path} has ended: No space left on device"
    ]
    assert len(events(path)) == 2
