from __future__ import annotations

import logging
from pathlib import Path

import pytest

from dflash2.policy.heat import HeatPolicy
from dflash2.policy.lru import LRUPolicy
from dflash2.policy.saved import load_policy, save_policy


def test_what_is_saved_can_be_loaded_and_only_its_owner_can_read_it(tmp_path: Path) -> None:
    file = tmp_path / "heat.json"
    save_policy(HeatPolicy(8, 0.8), file)
    assert file.stat().st_mode & 0o777 == 0o600
    assert [path.name for path in tmp_path.iterdir()] == ["heat.json"]
    load_policy(HeatPolicy(8, 0.8), file)


def test_a_policy_that_learns_nothing_leaves_no_file(tmp_path: Path) -> None:
    save_policy(LRUPolicy(8), tmp_path / "lru.json")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("text", ["", "[1]", "{", '{"policy": "heat", "version": 2, "shares": 3}', "\x00"])
def test_a_file_that_makes_no_sense_is_named_and_does_no_harm(
    tmp_path: Path, text: str, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "heat.json"
    file.write_text(text)
    policy = HeatPolicy(8, 0.8)
    with caplog.at_level(logging.WARNING):
        load_policy(policy, file)
    assert len(caplog.messages) == 1
    assert policy.state() == HeatPolicy(8, 0.8).state()


def test_without_a_file_nothing_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    load_policy(HeatPolicy(8, 0.8), tmp_path / "heat.json")
    assert not caplog.messages


def test_a_folder_that_is_gone_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    save_policy(HeatPolicy(8, 0.8), tmp_path / "gone" / "heat.json")
    assert "cannot be saved" in caplog.messages[0]
