"""Reading the file: what loads, and what each mistake is told."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflash2.config import Config, load_config, parse_config
from dflash2.errors import ConfigError

REFERENCE = """
{ "enable": true,
  "memory":   { "hbm_reserve_mb": 20480, "dram_capacity_mb": 128000, "nvme_capacity_mb": 512000, "staging_buffer_size_mb": 512 },
  "kv_block": { "block_size": 128, "prefetch_window": 4 },
  "policy":   { "cold_threshold": 0.8, "swap_batch_size": 32 } }
"""  # noqa: E501 - as users have it


def problems_of(text: str) -> str:
    with pytest.raises(ConfigError) as caught:
        parse_config(text)
    return str(caught.value)


def nested(path: str, value: Any) -> str:
    """``{"memory": {"nvme_path": value}}`` for ``memory.nvme_path``."""
    document = value
    for part in reversed(path.split(".")):
        document = {part: document}
    return json.dumps(document)


def test_reference_configuration_loads_unchanged(tmp_path: Path) -> None:
    file = tmp_path / "dflash2_config.json"
    file.write_text(REFERENCE, encoding="utf-8")
    config = load_config(file)
    assert config.model_dump(exclude_unset=True) == json.loads(REFERENCE)


def test_defaults() -> None:
    assert parse_config("{}") == Config()
    assert Config().model_dump() == {
        "enable": False,
        "history_enabled": False,
        "page_port": None,
        "memory": {
            "hbm_reserve_mb": 20480,
            "hbm_capacity_mb": None,
            "dram_capacity_mb": None,
            "nvme_capacity_mb": 0,
            "nvme_daily_write_mb": None,
            "nvme_path": None,
            "nvme_paths": None,
            "staging_buffer_size_mb": 512,
        },
        "kv_block": {"block_size": 128, "prefetch_window": 4},
        "policy": {
            "eviction": "heat",
            "cold_threshold": 0.8,
            "swap_batch_size": 32,
            "adaptive": True,
            "high_watermark": 0.95,
            "low_watermark": 0.90,
            "refresh_interval_s": 1.0,
        },
        "scheduling": {
            "quantum_tokens": 32,
            "max_batch_tokens": 512,
            "max_running": 256,
            "admission_timeout_s": 60.0,
            "max_waiting": 1024,
            "order": "short_first",
            "reserve": "estimate",
            "smoothing": True,
            "smoothing_order": 2,
            "smoothing_cutoff": 0.0001,
        },
        "pipeline": {"enabled": True, "ring_tokens": 1 << 22, "max_requests": 1024},
        "lora": {
            "adapters": {},
            "directory": None,
            "max_loaded": 4,
            "max_rank": 16,
            "dram_capacity_mb": 1024,
        },
    }


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("kv_block.block_size", 8),
        ("kv_block.block_size", 1024),
        ("kv_block.prefetch_window", 8),
        ("policy.cold_threshold", 0),
        ("policy.cold_threshold", 1),
        ("policy.eviction", "lru"),
        ("policy.adaptive", False),
        ("memory.hbm_capacity_mb", 1),
        ("memory.hbm_capacity_mb", None),
        ("memory.dram_capacity_mb", 0),
        ("memory.nvme_path", "/var/lib/dflash2"),
        ("memory.nvme_daily_write_mb", 1),
        ("history_enabled", True),
        ("enable", False),
    ],
)
def test_values_at_the_edge_are_accepted(path: str, value: Any) -> None:
    config: Any = parse_config(nested(path, value))
    for part in path.split("."):
        config = getattr(config, part)
    assert config == value


@pytest.mark.parametrize(
    ("path", "value", "said"),
    [
        ("kv_block.prefetch_window", 3, "3 is out of range (4 to 8)"),
        ("kv_block.prefetch_window", 9, "9 is out of range (4 to 8)"),
        ("kv_block.block_size", 4, "4 is out of range (8 to 1024)"),
        ("kv_block.block_size", 2048, "2048 is out of range (8 to 1024)"),
        ("kv_block.block_size", 100, "100 is not a power of two; the nearest are 64 and 128"),
        ("policy.cold_threshold", 1.01, "1.01 is out of range (0.0 to 1.0)"),
        ("policy.cold_threshold", "0.8", '"0.8", a string, is not a number; write 0.8 without quotes'),
        ("policy.cold_threshold", True, "true, a boolean, is not a number"),
        ("policy.eviction", "LRU2", '"LRU2" is not "heat" or "lru"'),
        ("policy.eviction", "lruu", 'did you mean "lru"?'),
        ("policy.adaptive", 1, "1, a number, is not true or false"),
        ("policy.refresh_interval_s", 0, "0 is out of range (0.01 to 3600.0)"),
        ("policy.low_watermark", 0.95, "0.95 must be below high_watermark, which is 0.95"),
        ("policy.low_watermark", 0, "0 is out of range (above 0.0 to 1.0)"),
        ("memory.hbm_reserve_mb", -1, "-1 is out of range (0 to 1073741824 MiB)"),
        ("memory.dram_capacity_mb", 137438953472, "137438953472 is out of range (0 to 1073741824 MiB)"),
        ("memory.dram_capacity_mb", 10**29, "is out of range (0 to 1073741824 MiB)"),
        ("memory.dram_capacity_mb", True, "true, a boolean, is not a whole number"),
        ("memory.dram_capacity_mb", 64000.0, "write 64000"),
        ("memory.dram_capacity_mb", 1.5, "write 2"),
        ("memory.dram_capacity_mb", "64GiB", "write MiB as a number: 65536"),
        ("memory.dram_capacity_mb", "64GB", "61035 for 64 GB, 65536 if 64 GiB are meant"),
        ("memory.dram_capacity_mb", "512 mb", "488 for 512 MB, 512 if 512 MiB are meant"),
        ("memory.dram_capacity_mb", "64", "write 64 without quotes, which is MiB"),
        ("memory.dram_capacity_mb", "lots", '"lots", a string, is not a whole number'),
        ("memory.dram_capacity_mb", [1], "[1], an array, is not a whole number"),
        ("memory.hbm_capacity_mb", 0, "leave the key out"),
        ("memory.staging_buffer_size_mb", 0, "0 is out of range (1 to 1073741824 MiB)"),
        ("memory.nvme_path", "", "not a path"),
        ("memory.nvme_path", "/a\0b", "not a path"),
        ("memory.nvme_path", "/\ud800", "not a path"),
        ("memory.nvme_paths", "/a", "is not an array"),
        ("memory.nvme_paths", [], "0 entries are not at least 1"),
        ("memory.nvme_paths", [f"/{i}" for i in range(17)], "17 entries are not at most 16"),
        ("memory.nvme_paths", ["/a", "b"], '"b" is relative'),
        ("memory.nvme_paths", ["/a", "/b", "/b/"], '"/b" is named twice'),
        ("memory", None, "null is not an object"),
        ("scheduling", 3, "3, a number, is not an object"),
        ("scheduling.max_running", 0, "0 is out of range (1 to 65536)"),
        ("enable", "true", "write true without quotes"),
        ("enable", 1, "1, a number, is not true or false"),
        ("enable", None, "null is not true or false"),
    ],
)
def test_wrong_value(path: str, value: Any, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_config(nested(path, value))
    assert caught.value.path == path
    assert str(caught.value).startswith(f"{path}: ")
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("histroy_enabled", "did you mean history_enabled?"),
        ("kv_blok", "did you mean kv_block?"),
        ("memory.dram_capacity", "did you mean memory.dram_capacity_mb?"),
        ("memory.dramCapacityMB", "did you mean memory.dram_capacity_mb?"),
        ("memory.hbm-reserve-mb", "did you mean memory.hbm_reserve_mb?"),
        ("cold_threshold", "it belongs at policy.cold_threshold"),
        ("memory.cold_threshold", "it belongs at policy.cold_threshold"),
        ("memory.enable", "it belongs at the top, as enable"),
        ("policy.prefetch_windows", "did you mean kv_block.prefetch_window?"),
        ("kv_block.zzz", "the keys here are block_size, prefetch_window"),
    ],
)
def test_unknown_key_names_the_nearest(path: str, said: str) -> None:
    text = problems_of(nested(path, 1))
    assert text.startswith(f"{path}: unknown key")
    assert said in text


def test_an_unusual_key_is_quoted() -> None:
    assert problems_of('{"memory": {"a b": 1}}').startswith('memory["a b"]: unknown key')


def test_low_watermark_is_checked_when_only_high_is_written() -> None:
    assert problems_of(nested("policy.high_watermark", 0.5)).startswith("policy.low_watermark: 0.9 must be below")


def test_every_problem_is_listed_at_once() -> None:
    text = problems_of('{"enable": 1, "memory": {"hbm_reserve_mb": -1}, "policy": {"x": 1, "x": 2}}')
    first, *lines = text.splitlines()
    assert first == "4 problems in the configuration:"
    assert {line.split(":")[0].strip() for line in lines} == {"enable", "memory.hbm_reserve_mb", "policy.x"}


@pytest.mark.parametrize(
    ("text", "path"),
    [
        ('{"enable": true, "enable": true}', "enable"),
        ('{"memory": {"nvme_capacity_mb": 1, "nvme_capacity_mb": 1}}', "memory.nvme_capacity_mb"),
        ('{"memory": {}, "memory": {}}', "memory"),
    ],
)
def test_duplicate_key(text: str, path: str) -> None:
    assert problems_of(text).startswith(f"{path}: this key is written more than once")


def test_duplicate_key_inside_an_array_is_found() -> None:
    assert "x[1].y: this key is written more than once" in problems_of('{"x": [0, {"y": 1, "y": 1}]}')


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "is empty"),
        ("  \n", "is empty"),
        ("[]", "must hold one JSON object"),
        ("null", "must hold one JSON object"),
        ("{", "line 1, column 2"),
        ('{"enable": true,}', "is not valid JSON: line 1"),
        ('{"enable": true} x', "Extra data"),
        ("\ufeff{}", "byte-order mark"),
        ('{"policy": {"cold_threshold": NaN}}', "NaN is not a JSON number"),
        ('{"policy": {"cold_threshold": -Infinity}}', "-Infinity is not a JSON number"),
        ('{"policy": {"cold_threshold": 1e400}}', "policy.cold_threshold: Infinity is out of range"),
        ('{"memory": {"hbm_reserve_mb": ' + "9" * 9000 + "}}", "a number of 9000 digits"),
        ('{"a":' + "[" * 100_000 + "]" * 100_000 + "}", "nested too deeply"),
    ],
)
def test_text_that_is_not_a_configuration(text: str, said: str) -> None:
    assert said in problems_of(text)


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"", "is empty"),
        (b"\xef\xbb\xbf{}", "byte-order mark"),
        ("{}".encode("utf-16"), "byte-order mark"),
        (b"\x7fELF\xff\xfe", "is not UTF-8 text"),
        (b" " * 70_000, "is larger than 64 KiB"),
    ],
)
def test_file_that_is_not_a_configuration(tmp_path: Path, data: bytes, said: str) -> None:
    file = tmp_path / "c.json"
    file.write_bytes(data)
    with pytest.raises(ConfigError, match=said) as caught:
        load_config(file)
    assert str(file) in str(caught.value)


def test_file_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        load_config(tmp_path / "absent.json")
    with pytest.raises(ConfigError, match="Is a directory"):
        load_config(str(tmp_path))


def test_a_problem_names_its_file(tmp_path: Path) -> None:
    file = tmp_path / "c.json"
    file.write_text('{"enabel": true}', encoding="utf-8")
    with pytest.raises(ConfigError) as caught:
        load_config(file)
    assert str(file) in str(caught.value)


def test_relative_path_is_refused_with_the_one_beside_the_file(tmp_path: Path) -> None:
    file = tmp_path / "c.json"
    file.write_text(nested("memory.nvme_path", "data/../nvme"), encoding="utf-8")
    with pytest.raises(ConfigError) as caught:
        load_config(file)
    assert f'probably "{tmp_path}/nvme"' in str(caught.value)


def test_one_path_and_several_contradict_each_other() -> None:
    said = problems_of('{"memory": {"nvme_path": "/a", "nvme_paths": ["/a", "/b"]}}')
    assert "memory.nvme_paths: write either nvme_path or nvme_paths" in said
    assert "memory.nvme_paths[1]: 3, a number, is not a string" in problems_of('{"memory": {"nvme_paths": ["/a", 3]}}')


def test_relative_path_with_home_and_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/somebody")
    monkeypatch.setenv("SCRATCH", "/scratch")
    assert 'probably "/home/somebody/kv"' in problems_of(nested("memory.nvme_path", "~/kv"))
    assert 'probably "/scratch/kv"' in problems_of(nested("memory.nvme_path", "$SCRATCH/kv"))


def test_a_configuration_cannot_be_changed() -> None:
    config = Config()
    with pytest.raises(ValueError, match="frozen"):
        config.policy.cold_threshold = 0.5  # type: ignore[misc]


_KEYS = [
    *Config.model_fields,
    *(key for _, section in Config() if hasattr(section, "model_fields_set") for key, _ in section),
]
_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text() | st.sampled_from(_KEYS), inner, max_size=4),
    max_leaves=12,
)


def is_config_or_config_error(text: str) -> None:
    try:
        written = parse_config(text).model_dump(exclude_unset=True)
    except ConfigError:
        return
    assert written == json.loads(text)


@given(st.dictionaries(st.text() | st.sampled_from(_KEYS), _JSON))
def test_any_json_is_a_configuration_or_a_config_error(document: Any) -> None:
    is_config_or_config_error(json.dumps(document))


@given(st.text())
def test_any_text_is_a_configuration_or_a_config_error(text: str) -> None:
    is_config_or_config_error(text)
