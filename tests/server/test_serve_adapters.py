"""Adapters of the command line and of the configuration, put together."""

from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import ValidationError

from dflash2.commands.serve import with_adapters
from dflash2.config import LoraConfig
from dflash2.errors import ConfigError


def test_both_are_there_and_paths_are_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    written = LoraConfig(adapters={"a": "/x/a"}, max_rank=8)
    lora = with_adapters(written, ["b=there/b", "c=/y=z/c"], Path("all"))
    assert lora.adapters == {"a": "/x/a", "b": str(tmp_path / "there/b"), "c": "/y=z/c"}
    assert (lora.directory, lora.max_rank) == (str(tmp_path / "all"), 8)
    assert with_adapters(written, [], None) == written


@pytest.mark.parametrize("text", ["b", "=x", "b=", "a=/elsewhere"])
def test_what_is_no_adapter(text: str) -> None:
    with pytest.raises(ConfigError, match="--lora"):
        with_adapters(LoraConfig(adapters={"a": "/x/a"}), [text], None)


@pytest.mark.parametrize("keys", [{"adapters": {"a": "x"}}, {"directory": "x"}, {"max_loaded": 0}, {"max_rank": 0}])
def test_what_the_file_may_not_say(keys: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        LoraConfig.model_validate(keys)
