"""The load generator against a real server over a scripted engine."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.engine.fake_engine import FakeEngine, says
from tests.server.harness import MODEL, serving

from dflash2.bench.client import Sample
from dflash2.bench.load import COUNTED, Run
from dflash2.bench.report import plot, summary
from dflash2.bench.workload import ChatShape, TraceReader, chats
from dflash2.cli import main
from dflash2.errors import TraceError

SMALL = ["--sessions", "4", "--turns", "2", "--prompt-words", "5", "--output-tokens", "6", "--concurrency", "3"]


def test_conversations_are_repeatable_and_share_what_they_should() -> None:
    shape = ChatShape(sessions=6, turns=2, prompt_words=10, output_tokens=8, shared_words=20, groups=2, seed=3)
    one, again = chats(shape), chats(shape)
    assert one == again and len(one) == 6
    assert one[0].system == one[2].system != one[1].system and len(one[0].system.split()) == 20
    texts = [turn.text for session in one for turn in session.turns]
    assert len(set(texts)) == 12 and all(len(text.split()) == 10 for text in texts)
    assert chats(ChatShape(6, 2, 10, 8, 20, 2, seed=4)) != one


def trace(path: Path, *rows: object) -> Path:
    path.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows))
    return path


def test_a_trace_keeps_its_times_and_what_requests_share(tmp_path: Path) -> None:
    rows = [
        {"timestamp": 5000, "input_length": 1024, "output_length": 900, "hash_ids": [1, 2]},
        {"timestamp": 9000, "input_length": 1500, "output_length": 3, "hash_ids": [1, 3, 4]},
        {"timestamp": 9500, "input_length": 10, "output_length": 3, "hash_ids": [9]},
    ]
    one, two = TraceReader(
        trace(tmp_path / "t", *rows), 2, speed=2.0, words_per_block=7, max_output_tokens=50
    ).sessions()
    assert (one.start_s, two.start_s) == (0.0, 2.0)
    assert (one.turns[0].max_tokens, two.turns[0].max_tokens) == (50, 3)
    words = [session.turns[0].text.split() for session in (one, two)]
    assert (
        [len(found) for found in words] == [14, 21] and words[0][:7] == words[1][:7] and words[0][7:] != words[1][7:14]
    )


@pytest.mark.parametrize(
    "row", ["{", "[]", '{"timestamp": 1}', '{"timestamp": 1, "output_length": 1, "hash_ids": [null]}']
)
def test_a_line_that_is_not_a_request_is_named(row: str, tmp_path: Path) -> None:
    good = {"timestamp": 1, "output_length": 1, "hash_ids": [1]}
    with pytest.raises(TraceError, match="line 2"):
        TraceReader(trace(tmp_path / "t", good, row), 9).sessions()
    with pytest.raises(TraceError, match="cannot read"):
        TraceReader(tmp_path / "absent", 9).sessions()


def test_a_run_from_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fake = FakeEngine(step_s=0.001)
    with serving(fake) as server:
        argv = [
            "bench",
            "--url",
            server.url,
            *SMALL,
            "--json",
            str(tmp_path / "r.json"),
            "--plot",
            str(tmp_path / "p.png"),
        ]
        assert main(argv) == 0
    shown = capsys.readouterr().out
    assert f"8 requests to {MODEL}" in shown and "time to first token" in shown
    result = json.loads((tmp_path / "r.json").read_text())
    assert (result["requests"], result["failed"], result["output_tokens"]) == (8, 0, 48)
    assert result["prompt_tokens"] == sum(len(request.token_ids) for request in fake.added)
    assert result["server"] is None and result["settings"]["turns"] == "2" and "api_key" not in result["settings"]
    assert all(0 <= sample["start_s"] <= sample["first_s"] <= sample["end_s"] for sample in result["samples"])
    assert result["ttft_s"]["p50"] <= result["ttft_s"]["max"]
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")
    second_turns = [request for request in fake.added if len(request.token_ids) > 40]
    assert len(fake.added) == 8 and second_turns, "a second turn carries the first and its answer"


def test_no_more_conversations_at_once_than_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    most = [0]

    def counting(request: object) -> object:
        most[0] = max(most[0], len(fake.running))
        return iter([97, 98])

    fake = FakeEngine(script=counting, step_s=0.005)  # type: ignore[arg-type]
    with serving(fake) as server:
        main(["bench", "--url", server.url, *SMALL, "--sessions", "9", "--concurrency", "2", "--output-tokens", "2"])
    assert 1 <= most[0] < 2, "counted before the request itself is added"


def test_failed_requests_are_counted_and_end_their_conversation(capsys: pytest.CaptureFixture[str]) -> None:
    with serving(FakeEngine(script=says(97)), api_key="k") as server:
        assert main(["bench", "--url", server.url, *SMALL, "--model", "nonsense", "--api-key", "k"]) == 1
        shown = capsys.readouterr().out
        assert "4 failed: 404: there is no model 'nonsense'" in shown
        assert main(["bench", "--url", server.url, *SMALL]) == 1
        assert "names no model" in capsys.readouterr().err


def test_no_server(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--url", "http://127.0.0.1:9", *SMALL]) == 1
    assert "is a server there?" in capsys.readouterr().err


def test_the_summary_is_arithmetic() -> None:
    samples = [
        Sample(0, 0, 0.0, 1.0, 3.0, prompt_tokens=100, cached_tokens=50, output_tokens=5),
        Sample(1, 0, 1.0, 4.0, 4.0, prompt_tokens=100, cached_tokens=0, output_tokens=1),
        Sample(2, 0, 1.0, None, 2.0, error="503: busy"),
    ]
    activity = [{"time_s": at, **dict.fromkeys(COUNTED, 10.0 * at)} for at in (0.0, 1.0, 2.0)]
    found = summary(Run(samples, activity, wall_s=4.0, model="m"))
    assert found["ttft_s"] == {
        "mean": 2.0,
        "p50": 2.0,
        "p90": pytest.approx(2.8),
        "p99": pytest.approx(2.98),
        "max": 3.0,
    }
    assert found["tpot_s"]["mean"] == 0.5 and found["cached_ratio"] == 0.25 and found["output_tokens_per_s"] == 1.5
    assert found["errors"] == {"503: busy": 1} and found["server"]["swap_in_blocks"] == 20


@pytest.mark.parametrize("samples", [[], [Sample(0, 0, 0.0, None, 1.0, error="x")], [Sample(0, 0, 0.0, 0.5, 1.0)]])
def test_whatever_happened_can_be_plotted(samples: list[Sample], tmp_path: Path) -> None:
    plot(Run(samples, [{"time_s": 0.0, **dict.fromkeys(COUNTED, 0.0)}], model="m"), tmp_path / "p.svg")
    assert "<svg" in (tmp_path / "p.svg").read_text()
