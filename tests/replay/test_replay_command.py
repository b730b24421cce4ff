from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from tests.replay.small_trace import SMALL_TRACE

from dflash2.cli import main

FIELDS = {
    *("policy", "capacity_blocks", "requests", "block_refs", "prefix_hit_ratio", "hits_by_tier", "bytes_in"),
    *("bytes_out", "nvme_bytes_written", "prefetch_accuracy", "calibration"),
}


def report(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert main(["replay", *arguments, "--json"]) == 0
    return dict(json.loads(capsys.readouterr().out))


def test_json_has_one_result_for_each_policy_and_size(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ("--policy", "heat,lru", "--capacity-blocks", "64,256", "--upto", "300")
    document = report(capsys, str(SMALL_TRACE), *arguments)
    assert document["trace"] == str(SMALL_TRACE)
    results = document["results"]
    assert [(one["policy"], one["capacity_blocks"]) for one in results] == [
        *[("heat", 64), ("heat", 256), ("lru", 64), ("lru", 256)]
    ]
    for one in results:
        assert set(one) >= FIELDS and one["requests"] == 300
        assert one["prefix_hit_ratio"] == one["hit_blocks"] / one["block_refs"]
        assert sum(one["hits_by_tier"].values()) == one["hit_blocks"]
    for heat, used, count in results[0]["calibration"]:
        assert 0 <= heat <= 1 and 0 <= used <= 1 and count > 0


def test_a_stream_gives_what_the_file_gives(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = ("--policy", "lru,opt", "--capacity-blocks", "64")
    file = report(capsys, str(SMALL_TRACE), *arguments)
    monkeypatch.setattr("sys.stdin", io.StringIO(SMALL_TRACE.read_text()))
    assert report(capsys, "-", *arguments)["results"] == file["results"]


def test_a_profile_gives_modelled_times(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    profile = tmp_path / "profile.json"
    profile.write_text('{"prefill_tokens_per_s": 512, "dram_to_hbm_bytes_per_s": 1048576, "block_bytes": 262144}')
    trace = tmp_path / "t.jsonl"
    line = '{"timestamp": %d, "input_length": %d, "output_length": 1, "hash_ids": %s}\n'
    trace.write_text(line % (0, 1024, [1, 2]) + line % (9000, 1024, [3, 4]) + line % (18000, 1536, [1, 2, 5]))
    sizes = ("--policy", "lru", "--capacity-blocks", "3/3", "--device-profile", str(profile))
    (result,) = report(capsys, str(trace), *sizes)["results"]
    assert result["hits_by_tier"] == {"hbm": 1, "dram": 1, "nvme": 0}
    # two blocks computed in 2 s twice; then 1 MiB loaded in 1 s and one block computed in 1 s
    assert result["modelled_ttft_ms"]["p50"] == 2000.0


def test_tables_and_a_picture(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MPLCONFIGDIR", str(tmp_path))
    plot = tmp_path / "p.png"
    arguments = ["--policy", "heat,lru", "--capacity-blocks", "64/96/300", "--upto", "200", "--plot", str(plot)]
    assert main(["replay", str(SMALL_TRACE), *arguments]) == 0
    printed = capsys.readouterr().out
    assert "Leading blocks found at arrival" in printed and "What was moved" in printed and "mean heat" in printed
    assert plot.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (("/nowhere.jsonl", "--capacity-blocks", "9"), 1, "cannot open the trace"),
        ((str(SMALL_TRACE), "--capacity-blocks", "9", "--policy", "lrru"), 1, "there is no policy 'lrru'"),
        ((str(SMALL_TRACE), "--capacity-blocks", "9", "--plot", "p.nothing"), 1, "cannot draw"),
        (("/dev/null", "--capacity-blocks", "9"), 1, "holds no request"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(
    arguments: tuple[str, ...], code: int, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["replay", *arguments, "--upto", "3"]) == code
    printed = capsys.readouterr().err
    assert message in printed and printed.count("\n") == 1


@pytest.mark.parametrize("text", ['{"prefill_tokens_per_s": 0}', '{"nvme_read_bytes_per_s": "fast"}', "[]", "{"])
def test_a_wrong_profile_is_an_error(text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    profile = tmp_path / "profile.json"
    profile.write_text(text)
    arguments = ["replay", str(SMALL_TRACE), "--capacity-blocks", "9", "--device-profile", str(profile)]
    assert main(arguments) == 2
    assert "profile" in capsys.readouterr().err
