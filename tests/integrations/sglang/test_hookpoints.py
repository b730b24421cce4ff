"""The check that names what moved, on functions of the standard library."""

from __future__ import annotations

import pytest

from dflash2.integrations.sglang.hookpoints import IN_FRONT_END, IN_SCHEDULER, READ_ONLY, HookPoint, moved


@pytest.mark.parametrize(
    ("path", "parameters", "said"),
    [
        ("json.no_such_function", ("obj",), "json.no_such_function is gone"),
        ("no_such_module.function", (), "no_such_module.function is gone"),
        ("json.dumps", ("obj", "renamed"), "json.dumps now takes"),
        ("bisect.insort", ("x", "a"), "bisect.insort now takes"),
    ],
)
def test_what_moved_is_named_with_what_it_was_for(path: str, parameters: tuple[str, ...], said: str) -> None:
    (problem,) = moved([HookPoint(path, parameters, "the reason")])
    assert said in problem
    assert "the reason" in problem


def test_what_stayed_is_not_named() -> None:
    assert (
        moved([HookPoint("json.dumps", ("obj", "indent"), ""), HookPoint("json.JSONEncoder.encode", ("o",), "")]) == []
    )


def test_no_place_is_listed_twice() -> None:
    paths = [point.path for point in (*IN_FRONT_END, *IN_SCHEDULER, *READ_ONLY)]
    assert len(paths) == len(set(paths))
