"""``dflash2 doctor`` from the command line, on this machine."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.doctor.models import LLAMA_3_8B

from dflash2 import cli
from dflash2.doctor.checks import CHECKS
from dflash2.doctor.profile import read_profile


@pytest.fixture
def config_file(tmp_path: Path) -> Path:
    file = tmp_path / "c.json"
    memory = {"dram_capacity_mb": 16, "nvme_capacity_mb": 1, "nvme_path": str(tmp_path / "nvme")}
    file.write_text(json.dumps({"enable": True, "memory": memory}), encoding="utf-8")
    return file


def test_text_and_json_say_the_same(config_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code = cli.main(["doctor", "--config", str(config_file)])
    text = capsys.readouterr().out
    assert cli.main(["doctor", "--config", str(config_file), "--json"]) == code
    document = json.loads(capsys.readouterr().out)
    assert document["exit_code"] == code
    assert [check["id"] for check in document["checks"]] == list(CHECKS)
    for check in document["checks"]:
        assert f"{check['status']:<9}{check['id']}" in text
    statuses = [check["status"] for check in document["checks"]]
    assert code == (2 if "error" in statuses else 1 if "warn" in statuses else 0)


def test_an_invalid_file_ends_with_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "c.json"
    file.write_text('{"enabel": true}', encoding="utf-8")
    assert cli.main(["doctor", "--config", str(file)]) == 2
    assert "did you mean enable?" in " ".join(capsys.readouterr().out.split())


def test_probe_writes_a_profile_and_nothing_else(config_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = config_file.parent / "p.json"
    before = set(config_file.parent.iterdir())
    arguments = ["doctor", "--config", str(config_file), "--probe", "--probe-mb", "8", "--profile", str(file)]
    cli.main([*arguments, "--json"])
    document = json.loads(capsys.readouterr().out)
    assert document["profile"] == read_profile(file).to_json()
    assert set(config_file.parent.iterdir()) == before | {file}
    cli.main(arguments)
    assert "DRAM to HBM:" in capsys.readouterr().out


def test_a_profile_needs_a_probe(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["doctor", "--profile", str(tmp_path / "p.json")]) == 2
    assert "give both" in capsys.readouterr().err


def test_the_model_sizes_staging(config_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = config_file.parent / "config.json"
    model.write_text(json.dumps(LLAMA_3_8B | {"num_hidden_layers": 2}), encoding="utf-8")
    cli.main(["doctor", "--config", str(config_file), "--model", str(model), "--json"])
    found = {check["id"]: check for check in json.loads(capsys.readouterr().out)["checks"]}
    # 2 * 2 * 8 * 128 * 2 bytes * 128 tokens = 1 MiB a block: 128 MiB can be used of the default 512.
    assert "are 128 MiB" in found["staging-size"]["found"]
    assert "write 128" in found["staging-size"]["advice"]


def test_memory_is_not_measured_as_a_disk(
    config_file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from dflash2.doctor import mounts

    mount = mounts.Mount(Path("/"), "0:1", "tmpfs", "tmpfs", read_only=False)
    monkeypatch.setattr(mounts, "find_mount", lambda machine, path: mount)
    cli.main(["doctor", "--config", str(config_file), "--probe", "--probe-mb", "8", "--json"])
    output = capsys.readouterr()
    assert json.loads(output.out)["profile"]["nvme_read_bytes_per_s"] is None
    assert "NVMe is not measured" in " ".join(output.err.split())
