"""The command line: exit codes, one line per error, and that help loads nothing heavy."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

import pytest

from dflash2 import __version__, cli
from dflash2.config import load_config
from dflash2.errors import CapacityError, ConfigError, DFlash2Error


class Raising:
    """A sub-command ``fail`` that raises what it is given."""

    def __init__(self, error: BaseException) -> None:
        self.error = error

    def add_parser(self, subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
        subparsers.add_parser("fail").set_defaults(run=self.run)

    def run(self, args: argparse.Namespace) -> int:
        raise self.error


def python(*args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *args], capture_output=True, text=True, timeout=120, check=False)


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (ConfigError("is wrong", "memory.x"), 2, "dflash2: error: memory.x: is wrong\n"),
        (CapacityError("no room"), 1, "dflash2: error: no room\n"),
        (KeyboardInterrupt(), 130, "dflash2: interrupted\n"),
    ],
)
def test_an_error_is_one_line_and_a_code(
    error: BaseException,
    code: int,
    line: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(cli, "COMMANDS", (Raising(error),))
    assert cli.main(["fail"]) == code
    output = capsys.readouterr()
    assert (output.out, output.err) == ("", line)


def test_debug_shows_where_an_error_comes_from(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli, "COMMANDS", (Raising(CapacityError("no room")),))
    with pytest.raises(DFlash2Error, match="no room"):
        cli.main(["--debug", "fail"])


def test_a_bug_is_not_dressed_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli, "COMMANDS", (Raising(KeyError("bug")),))
    with pytest.raises(KeyError):
        cli.main(["fail"])


@pytest.mark.parametrize(
    "argv", [[], ["nonsense"], ["config"], ["config", "check"], ["config", "check", "f", "--world-size", "0"]]
)
def test_a_wrong_command_line_ends_with_2(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(argv)
    assert caught.value.code == 2
    assert "usage: dflash2" in capsys.readouterr().err


def test_help_says_what_the_name_is_not(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(["--help"])
    assert caught.value.code == 0
    assert "DFlash2 has nothing to do with it" in " ".join(capsys.readouterr().out.split())


def test_module_and_version() -> None:
    result = python("-m", "dflash2", "--version")
    assert (result.returncode, result.stdout) == (0, f"dflash2 {__version__}\n")


def test_help_loads_nothing_heavy() -> None:
    script = (
        "import sys; from dflash2.cli import build_parser; build_parser().format_help(); "
        "print(sorted({name.partition('.')[0] for name in sys.modules} "
        "& {'torch', 'transformers', 'numpy', 'pydantic', 'fastapi', 'rich', 'prometheus_client'}))"
    )
    result = python("-c", script)
    assert (result.stdout, result.stderr) == ("[]\n", "")


def test_init_writes_a_file_that_check_accepts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.main(["config", "init"]) == 0
    file = tmp_path / "dflash2_config.json"
    config = load_config(file)
    assert config.enable is True
    assert config.memory.dram_capacity_mb is not None
    capsys.readouterr()
    assert cli.main(["config", "check", str(file), "--world-size", "2"]) == 0
    output = capsys.readouterr().out
    assert output.startswith(f"{file} is valid\nrank 0 of 2")
    assert f"memory.dram_capacity_mb = {config.memory.dram_capacity_mb} MiB" in output


def test_init_overwrites_only_when_forced(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "c.json"
    file.write_text("precious", encoding="utf-8")
    assert cli.main(["config", "init", str(file)]) == 1
    assert "--force" in capsys.readouterr().err
    assert file.read_text(encoding="utf-8") == "precious"
    assert cli.main(["config", "init", str(file), "--force"]) == 0
    assert json.loads(file.read_text(encoding="utf-8"))["enable"] is True


def test_init_into_a_folder_that_is_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["config", "init", str(tmp_path / "absent" / "c.json")]) == 1
    assert "cannot write" in capsys.readouterr().err


def test_check_of_an_invalid_file_lists_the_problems(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "c.json"
    file.write_text('{"enabel": true, "memory": {"hbm_reserve_mb": "20GiB"}}', encoding="utf-8")
    assert cli.main(["config", "check", str(file)]) == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert f"2 problems in {file}" in output.err
    assert "did you mean enable?" in output.err
    assert "20480" in output.err


def test_check_of_a_file_for_a_larger_machine(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "c.json"
    file.write_text('{"memory": {"dram_capacity_mb": 1000000000}}', encoding="utf-8")
    assert cli.main(["config", "check", str(file)]) == 0
    output = capsys.readouterr().out
    assert "enable is not true" in output
    assert "does not fit this machine: memory.dram_capacity_mb" in output
