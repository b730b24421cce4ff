"""The README of this folder names tests that exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
NAMED = re.findall(r"`([\w/]+\.py)::(\w+)`", Path(__file__).with_name("README.md").read_text(encoding="utf-8"))


def test_it_names_many() -> None:
    assert len(NAMED) > 70


@pytest.mark.parametrize(("path", "name"), NAMED)
def test_every_test_named_exists(path: str, name: str) -> None:
    assert re.search(rf"def {name}\(", (TESTS / path).read_text(encoding="utf-8")), f"{path} has no {name}"
