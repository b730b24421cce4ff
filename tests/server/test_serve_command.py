"""The command as a process: what it prints, how it stops, what it refuses before the model is loaded."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
from tests.server.harness import PATIENCE_S

from dflash2.cli import build_parser, main
from dflash2.commands import serve
from dflash2.config import Config

ROOT = Path(__file__).parents[2]
ENABLED = {"enable": True, "memory": {"hbm_capacity_mb": 64, "dram_capacity_mb": 64, "nvme_capacity_mb": 0}}


def start(*arguments: str, **variables: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "tests.server.serve_scripted", "serve", *arguments]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(["src", os.environ.get("PYTHONPATH", "")]), **variables}
    return subprocess.Popen(
        command, cwd=ROOT, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )


@contextmanager
def running(*arguments: str, **variables: str) -> Iterator[tuple[subprocess.Popen[str], str, list[str]]]:
    """A process that listens: itself, its address, and what it has printed so far."""
    process = start(*arguments, "--port", "0", **variables)
    try:
        printed = []
        for line in process.stdout:
            printed.append(line.rstrip())
            if found := re.search(r"^DFlash2: serving .* on (http://\S+)", line):
                yield process, found[1], printed
                break
        else:
            pytest.fail("\n".join(printed))
    finally:
        process.kill()
        process.communicate(timeout=PATIENCE_S)


def ask(url: str, max_tokens: int = 5, **options: object) -> httpx.Response:
    return httpx.post(
        f"{url}/v1/completions", json={"model": "m", "prompt": "abc", "max_tokens": max_tokens}, **options
    )


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_it_serves_and_stops_with_zero(number: signal.Signals, tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    config.write_text(json.dumps({**ENABLED, "lora": {"adapters": {"one": "/x"}}}))
    options = ("--served-model-name", "m", "n", "--dtype", "float32", "--max-context", "50", "--config", str(config))
    options = (*options, "--lora", "two=/y")
    with running("--model", "echo", *options) as (process, url, printed):
        assert "loading echo float32 50 cpu" in printed
        assert "DFlash2: started, enable True, adapters {'one': '/x', 'two': '/y'}" in printed
        assert ask(url).json()["choices"][0]["text"] == "abcab"
        assert ask(url, max_tokens=48).status_code == 400
        assert [row["id"] for row in httpx.get(f"{url}/v1/models").json()["data"]] == ["m", "n"]
        process.send_signal(number)
        assert process.wait(PATIENCE_S) == 0


def stream_until_stopped(grace_s: str, max_tokens: int) -> tuple[int, str]:
    """Stop a server while it streams: its exit code, and the stream."""
    options = ("--served-model-name", "m", "--shutdown-grace-s", grace_s)
    with running("--model", "slow", *options) as (process, url, _):
        body = {"model": "m", "prompt": "abc", "max_tokens": max_tokens, "stream": True}
        with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=PATIENCE_S) as answer:
            parts = answer.iter_text()
            received = next(parts)
            process.send_signal(signal.SIGTERM)
            received += "".join(parts)
        return process.wait(PATIENCE_S), received


def test_a_running_stream_may_finish() -> None:
    code, received = stream_until_stopped(grace_s="200", max_tokens=300)
    assert received.endswith("data: [DONE]\n\n")
    assert (code, received.count('"text"')) == (0, 300)


def test_after_the_grace_period_a_stream_is_told_and_ended() -> None:
    code, received = stream_until_stopped(grace_s="0.2", max_tokens=900_000)
    assert "shutting down" in received.strip().split("\n\n")[-1]
    assert code == 0


def test_an_engine_that_broke_makes_the_exit_code_one() -> None:
    with running("--model", "breaks", "--served-model-name", "m") as (process, url, _):
        assert ask(url).status_code == 503
        assert httpx.get(f"{url}/health").status_code == 503
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE_S) == 1


def refused(arguments: Sequence[str], monkeypatch: pytest.MonkeyPatch) -> int:
    """Exit code of a command line that must fail before any model is loaded."""
    monkeypatch.setitem(sys.modules, "dflash2.engine.factory", None)  # importing it fails
    monkeypatch.setitem(sys.modules, "dflash2.engine.model_loader", None)
    return main(["serve", "--model", "echo", *arguments])


def test_a_taken_port(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert refused(["--port", str(port)], monkeypatch) == 1
    assert f"cannot listen on 127.0.0.1 port {port}" in capsys.readouterr().err


def test_an_address_of_another_machine(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert refused(["--port", "0", "--host", "203.0.113.1"], monkeypatch) == 1
    assert "cannot listen on 203.0.113.1" in capsys.readouterr().err


@pytest.mark.parametrize("content", [None, "{", '{"enable": true, "memory": {"dram": 5}}'])
def test_a_bad_configuration(
    content: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "config.json"
    if content is not None:
        config.write_text(content)
    assert refused(["--port", "0", "--config", str(config)], monkeypatch) == 2
    assert str(config) in capsys.readouterr().err


def test_an_unreadable_chat_template(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert refused(["--port", "0", "--chat-template", str(tmp_path / "none.jinja")], monkeypatch) == 1
    assert "none.jinja" in capsys.readouterr().err


@pytest.mark.parametrize(
    "options",
    [
        ("--port", "70000"),
        ("--max-context", "0"),
        ("--dtype", "int8"),
        ("--shutdown-grace-s", "-1"),
        ("--shutdown-grace-s", "nan"),
        ("--max-body-mb", "x"),
    ],
)
def test_a_bad_command_line(options: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SystemExit) as caught:
        refused(options, monkeypatch)
    assert caught.value.code == 2


@pytest.mark.parametrize(
    ("options", "variable", "key"), [((), None, None), ((), "v", "v"), (("--api-key", "o"), "v", "o"), ((), "", None)]
)
def test_the_key_comes_from_the_command_line_or_the_environment(
    options: tuple[str, ...], variable: str | None, key: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(serve.KEY_VARIABLE, raising=False)
    if variable is not None:
        monkeypatch.setenv(serve.KEY_VARIABLE, variable)
    args = build_parser().parse_args(["serve", "--model", "m", *options])
    assert serve.make_settings(args, Config()).api_key == key


@pytest.mark.parametrize(("host", "warned"), [("127.0.0.1", False), ("0.0.0.0", True)])
def test_an_open_address_without_a_key_is_warned_about(
    host: str, warned: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(ImportError):  # it gets as far as loading the model; nothing has listened yet
        refused(["--port", "0", "--host", host], monkeypatch)
    assert ("everybody who reaches" in capsys.readouterr().err) == warned
