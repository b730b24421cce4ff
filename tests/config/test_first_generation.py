"""The first generation's leftovers: what is said at start, and the file that is made of them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dflash2 import cli
from dflash2.config import first_generation_leftovers, load_config, parse_config
from dflash2.config.first_generation import migrate, old_variables


def migrated(**environ: str) -> dict[str, object]:
    document = migrate(environ).document
    parse_config(json.dumps(document))
    return document


def test_nothing_left_is_nothing_said(tmp_path: Path) -> None:
    environ = {"DFLASH2_API_KEY": "x", "SGLANG_DFLASH_X": "1", "PATH": "/bin"}
    assert first_generation_leftovers(environ, tmp_path) == []


def test_each_leftover_is_a_line_with_its_key(tmp_path: Path) -> None:
    (tmp_path / "dev/shm/dflash").mkdir(parents=True)
    environ = {"DFLASH_OFFLOAD_ENABLE": "1", "DFLASH_DRAM_LIMIT": "64", "DFLASH_SSD_DIR": "/x", "DFLASH_DRAFT": "m"}
    draft, dram, enable, ssd, shm = first_generation_leftovers(environ, tmp_path)
    assert "no longer acts; enable in dflash2_config.json" in enable
    assert "DFLASH_DRAM_LIMIT no longer acts; memory.dram_capacity_mb" in dram
    assert "told from" not in dram
    assert "DFLASH_SSD_DIR no longer acts; memory.nvme_path" in ssd
    assert "told from its name" in ssd
    assert "no key replaces it" in draft
    assert shm.startswith("/dev/shm/dflash is left over")


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("DFLASH_NVME_PATH", "memory.nvme_path"),
        ("DFLASH_NVME_LIMIT", "memory.nvme_capacity_mb"),
        ("DFLASH_CPU_LIMIT", "memory.dram_capacity_mb"),
        ("DFLASH_STAGING_SIZE", "memory.staging_buffer_size_mb"),
        ("DFLASH_HBM_RESERVE", "memory.hbm_reserve_mb"),
        ("DFLASH_BLOCK_SIZE", "kv_block.block_size"),
        ("DFLASH_PREFETCH_WINDOW", "kv_block.prefetch_window"),
        ("DFLASH_COLD_THRESHOLD", "policy.cold_threshold"),
        ("DFLASH_SWAP_BATCH", "policy.swap_batch_size"),
        ("DFLASH_MAX_CTX", None),
        ("DFLASH_TARGET_MODEL_PATH", None),
    ],
)
def test_other_variables_are_told_by_their_words(name: str, key: str | None) -> None:
    (variable,) = old_variables({name: ""})
    assert (variable.key, variable.certain) == (key, False)


@pytest.mark.parametrize(
    ("value", "mb"),
    [
        ("64", 65536),
        ("1023", 1023 * 1024),
        ("1024", 1024),
        ("65536", 65536),
        (str(64 << 30), 65536),
        ("64GiB", 65536),
        ("64G", 65536),
        ("64GB", 61035),
        ("0.5TiB", 524288),
        ("2048 MiB", 2048),
    ],
)
def test_sizes(value: str, mb: int) -> None:
    assert migrated(DFLASH_OFFLOAD_ENABLE="1", DFLASH_DRAM_LIMIT=value) == {
        "enable": True,
        "memory": {"dram_capacity_mb": mb},
    }


@pytest.mark.parametrize("value", ["half", "-1", "80%", "0.8", "", "9999999TiB"])
def test_a_size_that_is_none_is_left_out_and_named(value: str) -> None:
    migration = migrate({"DFLASH_DRAM_LIMIT": value})
    assert migration.document == {"enable": False}
    assert migration.notes[0].endswith("not a value that memory.dram_capacity_mb can take; left out")


@pytest.mark.parametrize(("value", "enable"), [("1", True), ("True", True), ("on", True), ("0", False), ("", False)])
def test_the_switch(value: str, enable: bool) -> None:
    assert migrated(DFLASH_OFFLOAD_ENABLE=value) == {"enable": enable}


def test_assumptions_are_told() -> None:
    notes = migrate({"DFLASH_DRAM_LIMIT": "64", "DFLASH_NVME_LIMIT_GB": "500"}).notes
    assert notes[0] == (
        "DFLASH_DRAM_LIMIT=64: memory.dram_capacity_mb = 65536 (a bare number below 1024 is taken as GiB)"
    )
    assert "= 512000 (the name says GB, read as GiB), told from the variable's name" in notes[1]
    assert "enable is false" in notes[2]
    assert 'policy.eviction "lru"' in notes[3]


def test_a_known_name_goes_before_a_guessed_one() -> None:
    migration = migrate({"DFLASH_CPU_LIMIT": "1", "DFLASH_DRAM_LIMIT": "2"})
    assert migration.document["memory"] == {"dram_capacity_mb": 2048}
    assert "DFLASH_CPU_LIMIT=1: left out, memory.dram_capacity_mb comes from DFLASH_DRAM_LIMIT" in migration.notes


def test_values_that_the_file_would_refuse_are_left_out() -> None:
    document = migrated(DFLASH_BLOCK_SIZE="100", DFLASH_NVME_PATH="relative", DFLASH_COLD_THRESHOLD="0.7")
    assert document == {"enable": False, "policy": {"cold_threshold": 0.7}}


def test_the_command_writes_a_valid_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("DFLASH_OFFLOAD_ENABLE", "true")
    monkeypatch.setenv("DFLASH_DRAM_LIMIT", "2GiB")
    file = tmp_path / "c.json"
    assert cli.main(["config", "migrate", str(file)]) == 0
    config = load_config(file)
    assert (config.enable, config.memory.dram_capacity_mb) == (True, 2048)
    assert "DFLASH_DRAM_LIMIT=2GiB: memory.dram_capacity_mb = 2048" in capsys.readouterr().out
    assert cli.main(["config", "migrate", str(file)]) == 1
    assert "--force" in capsys.readouterr().err


def test_the_command_without_old_variables(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("DFLASH_OFFLOAD_ENABLE", "DFLASH_DRAM_LIMIT"):
        monkeypatch.delenv(name, raising=False)
    assert cli.main(["config", "migrate", str(tmp_path / "c.json")]) == 1
    assert "nothing to migrate" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
