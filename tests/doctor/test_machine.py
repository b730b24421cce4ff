"""The real ways of touching a machine, on this one."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import sys
from pathlib import Path

import pytest

from dflash2.doctor import machine
from dflash2.doctor.case import open_case, read_config
from dflash2.doctor.checks import CHECKS, run_checks
from dflash2.doctor.machine import (
    DirectIO,
    Machine,
    file_system_space,
    installed_torch,
    run_command,
    try_direct_io,
)


def test_a_program_that_is_not_there() -> None:
    assert run_command(["dflash2-no-such-program"]) is None


def test_a_program_that_works_and_one_that_fails() -> None:
    good = run_command([sys.executable, "-c", "print('hello')"])
    assert good is not None
    assert (good.ok, good.text) == (True, "hello\n")
    bad = run_command([sys.executable, "-c", "import sys; sys.exit('broken')"])
    assert bad is not None
    assert (bad.ok, bad.text) == (False, "broken")


def test_a_program_that_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "COMMAND_TIMEOUT_S", 0.05)
    result = run_command([sys.executable, "-c", "import time; time.sleep(60)"])
    assert result is not None
    assert not result.ok
    assert "gave no answer" in result.text


def test_direct_io_is_tried_and_leaves_nothing(tmp_path: Path) -> None:
    trial = try_direct_io(tmp_path)
    assert trial.outcome in (DirectIO.WORKS, DirectIO.REFUSED)
    assert list(tmp_path.iterdir()) == []


def test_direct_io_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.open

    def refusing(path: str, flags: int, *rest: int) -> int:
        if flags & os.O_DIRECT:
            raise OSError(22, "Invalid argument")
        return real(path, flags, *rest)

    monkeypatch.setattr(os, "open", refusing)
    assert try_direct_io(tmp_path) == machine.DirectIOTrial(DirectIO.REFUSED, "Invalid argument")
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    trial = try_direct_io(tmp_path / "absent")
    assert (trial.outcome, trial.reason) == (DirectIO.NOT_WRITABLE, "No such file or directory")


def test_space(tmp_path: Path) -> None:
    space = file_system_space(tmp_path)
    assert 0 < space.free_bytes <= space.total_bytes


def test_torch_is_read_and_not_imported() -> None:
    build = installed_torch()
    assert build is not None
    assert build.version == importlib.metadata.version("torch")
    script = (
        "import sys; from dflash2.doctor.case import *; from dflash2.doctor.checks import *; "
        "from dflash2.doctor.machine import *; run_checks(open_case(Machine(), read_config(None))); "
        "import dflash2.doctor.plan_report, dflash2.commands.plan; "
        "print([name for name in ('torch', 'transformers') if name in sys.modules])"
    )
    result = run_command([sys.executable, "-c", script])
    assert result is not None
    assert result.text == "[]\n"


def test_cuda_version_of_a_build(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch/__init__.py").touch()
    (tmp_path / "torch/version.py").write_text("cuda: Optional[str] = '12.6'\nhip = None\n", encoding="utf-8")
    spec = importlib.util.spec_from_file_location(
        "torch", tmp_path / "torch/__init__.py", submodule_search_locations=[str(tmp_path / "torch")]
    )
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: spec)
    build = installed_torch()
    assert build is not None
    assert build.cuda == "12.6"


def test_paths_of_the_machine_are_below_its_root(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    fake = Machine(tmp_path, {})
    assert fake.nearest_existing(Path("/a/b/c")) == Path("/a")
    assert fake.nearest_existing(Path("/x/y")) == Path("/")
    assert fake.read("/a") is None


def test_this_machine_can_be_examined() -> None:
    results = run_checks(open_case(Machine(), read_config(None)))
    assert [result.id for result in results] == list(CHECKS)
