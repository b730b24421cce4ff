"""Mapping of the configuration to server arguments, and what is refused, without SGLang."""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dflash2 import build
from dflash2.config import parse_config
from dflash2.errors import ConfigError
from dflash2.integrations.sglang import plugin, settings
from dflash2.integrations.sglang.sizing import kv_budget_bytes
from dflash2.types import MIB


@pytest.fixture(autouse=True)
def _clean_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(settings.VARIABLE, "")
    monkeypatch.setattr(plugin, "_check_version", lambda: None)


def server_args(**changed: Any) -> SimpleNamespace:
    values: dict[str, Any] = {"page_size": None, "disaggregation_mode": "null", "pp_size": 1, "attn_dp_size": 1}
    return SimpleNamespace(**{**values, **changed})


def use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str) -> Path:
    path = tmp_path / "config.json"
    path.write_text(text)
    monkeypatch.setenv(settings.VARIABLE, str(path))
    return path


def refusal(args: SimpleNamespace, capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit) as ended:
        plugin.apply_config(args)
    assert ended.value.code not in (0, None)
    return capsys.readouterr().err


def test_enabled_switches_the_linker_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = use(tmp_path, monkeypatch, '{"enable": true, "kv_block": {"block_size": 64}}')
    args = server_args()
    plugin.apply_config(args)
    assert args.page_size == 64
    assert args.enable_unified_cache_external_linker is True
    assert args.unified_cache_external_linker_config["linker_extra_config"] == {"path": str(path)}


def test_a_disk_too_small_for_the_ranks_here_is_refused_before_the_model_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    memory = {"nvme_capacity_mb": 10**9, "nvme_path": str(tmp_path / "kv")}
    use(tmp_path, monkeypatch, json.dumps({"enable": True, "memory": memory}))
    assert "not enough space" in refusal(server_args(tp_size=4, nnodes=2, node_rank=1), capsys)
    assert {path.name for path in (tmp_path / "kv").iterdir()} == {"rank2", "rank3"}


def test_nothing_configured_changes_nothing() -> None:
    args = server_args()
    plugin.apply_config(args)
    assert vars(args) == vars(server_args())


@pytest.mark.parametrize("text", ["{}", '{"enable": false}'])
def test_not_enabled_says_so_and_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, text: str
) -> None:
    use(tmp_path, monkeypatch, text)
    args = server_args(enable_hierarchical_cache=True)
    plugin.apply_config(args)
    assert not hasattr(args, "enable_unified_cache_external_linker")
    assert "DFlash2: fallback, enable is not true" in caplog.text
    assert settings.configured_path() is None  # nor do the children hook anything


def test_missing_file_is_refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv(settings.VARIABLE, "/nowhere/config.json")
    assert "/nowhere/config.json" in refusal(server_args(), capsys)


@pytest.mark.parametrize("text", ['{"enable": "true"}', '{"enable": true, "memori": {}}', "{"])
def test_invalid_file_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], text: str
) -> None:
    path = use(tmp_path, monkeypatch, text)
    assert str(path) in refusal(server_args(), capsys)


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"enable_hierarchical_cache": True}, "HiCache"),
        ({"speculative_algorithm": "EAGLE"}, "--speculative-algorithm"),
        ({"disaggregation_mode": "prefill"}, "--disaggregation-mode"),
        ({"disable_radix_cache": True}, "--disable-radix-cache"),
        ({"pp_size": 2}, "--pp-size"),
    ],
)
def test_what_cannot_be_together_is_refused(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    changed: dict[str, Any],
    named: str,
) -> None:
    use(tmp_path, monkeypatch, '{"enable": true}')
    assert named in refusal(server_args(**changed), capsys)


def test_page_size_of_the_user_must_fit() -> None:
    config = parse_config('{"kv_block": {"block_size": 64}}')
    assert settings.page_size(config, None) == 64
    assert settings.page_size(config, 64) == 64
    assert settings.page_size(parse_config("{}"), 32) == 32
    with pytest.raises(ConfigError, match=r"kv_block\.block_size"):
        settings.page_size(config, 32)


def test_flag_gives_children_the_absolute_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    plugin.read_flag(None, object, SimpleNamespace(dflash2_config="config.json"))  # type: ignore[arg-type]
    assert os.environ[settings.VARIABLE] == str(tmp_path / "config.json")


def budget(memory: dict[str, int], device: str = "cuda") -> int:
    config = parse_config(json.dumps({"memory": memory, "policy": {"swap_batch_size": 4}}))
    return kv_budget_bytes(config, device, found=10, token_bytes=MIB // 16, page_tokens=16)


@pytest.fixture
def device_of_100_mib_with_70_free(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "total_device_bytes", lambda device: 100 * MIB)
    monkeypatch.setattr(build, "free_device_bytes", lambda device: 70 * MIB)


def test_a_cpu_pool_has_the_configured_size() -> None:
    assert budget({"hbm_capacity_mb": 3}, "cpu") == 3 * MIB
    assert budget({}, "cpu") == 10


@pytest.mark.usefixtures("device_of_100_mib_with_70_free")
def test_a_device_pool_leaves_room_for_reserve_and_staging() -> None:
    staging = 2 * 4
    assert budget({"hbm_reserve_mb": 40}) == (100 - 40 - staging) * MIB
    assert budget({"hbm_reserve_mb": 40, "hbm_capacity_mb": 7}) == 7 * MIB


@pytest.mark.usefixtures("device_of_100_mib_with_70_free")
@pytest.mark.parametrize(("reserve", "said"), [(92, "leave nothing"), (20, "all but 70 MiB")])
def test_a_device_pool_that_cannot_be_is_refused(capsys: pytest.CaptureFixture[str], reserve: int, said: str) -> None:
    with pytest.raises(SystemExit):
        budget({"hbm_reserve_mb": reserve})
    assert said in capsys.readouterr().err
