"""``dflash2 serve --record``, and what ``dflash2 replay`` makes of the file."""

from __future__ import annotations

import json
import signal
import time
from pathlib import Path

import httpx
import pytest
from tests.replay.running import run_trace
from tests.server.harness import PATIENCE_S
from tests.server.test_serve_command import ENABLED, running

from dflash2.replay.events import Arrival
from dflash2.replay.readers import read_events
from dflash2.replay.source import open_source


def say(url: str, prompt: str, max_tokens: int = 5, **options: float) -> httpx.Response:
    body = {"model": "m", "prompt": prompt, "max_tokens": max_tokens}
    return httpx.post(f"{url}/v1/completions", json=body, **options)


def test_traffic_is_recorded_and_can_be_replayed(tmp_path: Path) -> None:
    config, recording = tmp_path / "config.json", tmp_path / "traffic.jsonl"
    config.write_text(json.dumps({**ENABLED, "kv_block": {"block_size": 8}}))
    options = ("--served-model-name", "m", "--config", str(config), "--record", str(recording))
    with running("--model", "echo", *options) as (process, url, _):
        for words in ("a secret of twenty letters", "a secret of twenty numbers", "b"):
            assert say(url, words).status_code == 200
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE_S) == 0
    assert "secret" not in recording.read_text()
    with open_source(str(recording)) as source:
        events = list(read_events(source))
    assert [isinstance(event, Arrival) for event in events] == [True, False] * 3
    (result,) = run_trace(recording, ("lru",), (100,))
    assert [sum(hits) for hits in result.outcomes.hits] == [0, 2, 0]
    assert result.outcomes.num_references == 6


def test_a_request_that_the_client_leaves_has_an_end_without_a_reason(tmp_path: Path) -> None:
    recording = tmp_path / "traffic.jsonl"
    with running("--model", "slow", "--served-model-name", "m", "--record", str(recording)) as (_, url, _printed):
        with pytest.raises(httpx.TimeoutException):
            say(url, "abc", max_tokens=5000, timeout=0.5)
        lines = wait_for_lines(recording, 3)
    assert lines[-1]["event"] == "finish" and lines[-1]["stop_reason"] in (None, "cancelled")


def test_an_answer_with_a_stop_string_is_recorded_as_the_client_was_told(tmp_path: Path) -> None:
    recording = tmp_path / "traffic.jsonl"
    body = {"model": "m", "prompt": "one STOP two", "max_tokens": 900, "stop": "STOP"}
    with running("--model", "echo", "--served-model-name", "m", "--record", str(recording)) as (_, url, _printed):
        answer = httpx.post(f"{url}/v1/completions", json=body, timeout=PATIENCE_S).json()
        lines = wait_for_lines(recording, 3)
    assert answer["choices"][0]["finish_reason"] == lines[-1]["stop_reason"] == "stop"


def wait_for_lines(path: Path, count: int) -> list[dict[str, object]]:
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        lines = path.read_text().splitlines()
        if len(lines) >= count:
            return [json.loads(line) for line in lines]
        time.sleep(0.02)
    pytest.fail(f"{path} has not got {count} lines")
