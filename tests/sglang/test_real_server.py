"""The plug-in in SGLang's real server with a real model, under pressure, across a kill, and when it must refuse."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.sglang.conftest import MODEL, PYTHON
from tests.sglang.server import Reference, Server, reference_of

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(1800)]

NUM_CHATS, NUM_TURNS, PROMPT_TOKENS, NUM_NEW = 16, 3, 160, 10
BLOCK = 16
KIB_PER_TOKEN = 45  # 30 layers x 2 x 3 heads x 64 x 4 bytes
CONFIG = {
    "enable": True,
    "memory": {"hbm_capacity_mb": 36, "dram_capacity_mb": 48, "nvme_capacity_mb": 512, "staging_buffer_size_mb": 8},
    "kv_block": {"block_size": BLOCK},
    "policy": {"swap_batch_size": 8},
}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("sglang")


@pytest.fixture(scope="module")
def config(place: Path) -> Path:
    path = place / "dflash2_config.json"
    memory = {**CONFIG["memory"], "nvme_path": str(place / "nvme")}  # type: ignore[dict-item]
    path.write_text(json.dumps({**CONFIG, "memory": memory}))
    return path


@pytest.fixture(scope="module")
def reference(place: Path) -> Reference:
    """From plain SGLang, with the plug-in installed and not asked for."""
    server = Server(PYTHON, MODEL, place / "plain.log", "--max-total-tokens", "16384", "--page-size", str(BLOCK))
    try:
        found = reference_of(server.wait(), NUM_CHATS, NUM_TURNS, PROMPT_TOKENS, NUM_NEW)
        assert "DFlash2" not in server.text().replace("dflash2", "")
        return found
    finally:
        server.kill()


@pytest.fixture(scope="module")
def first_run(place: Path, config: Path) -> Iterator[Server]:
    server = Server(PYTHON, MODEL, place / "first.log", "--dflash2-config", str(config))
    yield server.wait()
    server.kill()


def test_outputs_are_those_of_plain_sglang_and_come_from_all_tiers(reference: Reference, first_run: Server) -> None:
    capacity = CONFIG["memory"]["hbm_capacity_mb"] * 1024 // KIB_PER_TOKEN  # type: ignore[index]
    assert max(map(len, reference.prompts)) < capacity < sum(map(len, reference.prompts[-NUM_CHATS:])) / 4
    seen = reference.compare(first_run, NUM_NEW)
    assert seen.wrong == []
    assert seen.ties <= 1
    assert seen.host_tokens > 0
    metrics = first_run.metrics_of_rank("0")
    assert metrics["swap_in_blocks_total"] > 0
    assert metrics["prefix_hit_tokens_total.dram"] > 0
    assert metrics["nvme_loaded_blocks_total"] > 0
    assert metrics["failed_copies_total"] == 0
    text = first_run.text()
    assert "DFlash2: enabled, total virtual cache size" in text
    assert "dflash2_swap" in text


def test_a_killed_server_finds_its_blocks_again(
    reference: Reference, first_run: Server, place: Path, config: Path
) -> None:
    first_run.kill()
    server = Server(PYTHON, MODEL, place / "second.log", "--dflash2-config", str(config))
    try:
        server.wait()
        assert "blocks of an earlier run found on NVMe" in server.text()
        tail = Reference(reference.prompts[-NUM_CHATS:], reference.outputs[-NUM_CHATS:], reference.gaps[-NUM_CHATS:])
        seen = tail.compare(server, NUM_NEW)
        assert seen.wrong == []
        assert seen.host_tokens > 0
        assert server.metrics_of_rank("0")["nvme_loaded_blocks_total"] > 0
        server.post("/flush_cache")
        first = Reference(tail.prompts[:1], tail.outputs[:1], tail.gaps[:1])
        seen = first.compare(server, NUM_NEW)
        assert (seen.wrong, seen.cached_tokens) == ([], 0)
    finally:
        server.kill()


@pytest.mark.parametrize(
    ("text", "arguments", "said"),
    [
        (None, (), "cannot read"),
        ('{"enable": true, "memory": {"nvme_path": "relative"}}', (), "memory.nvme_path"),
        ('{"enable": true}', ("--enable-hierarchical-cache",), "HiCache"),
    ],
    ids=["missing", "invalid", "hicache"],
)
def test_what_cannot_be_ends_with_a_message(
    tmp_path: Path, text: str | None, arguments: tuple[str, ...], said: str
) -> None:
    path = tmp_path / "config.json"
    if text is not None:
        path.write_text(text)
    server = Server(PYTHON, MODEL, tmp_path / "log", "--dflash2-config", str(path), *arguments)
    try:
        assert server.process.wait(300) != 0
        assert "DFlash2: cannot start" in server.text()
        assert said in server.text()
    finally:
        server.kill()


def test_hooks_are_where_they_were() -> None:
    """Names what moved when SGLang's interface changes."""
    code = (
        "import sglang.srt.managers.scheduler\n"
        "from dflash2.integrations.sglang import hookpoints as h\n"
        "print('\\n'.join(h.moved((*h.IN_FRONT_END, *h.IN_SCHEDULER, *h.READ_ONLY))))"
    )
    done = subprocess.run([PYTHON, "-c", code], capture_output=True, text=True, timeout=600, check=True)
    assert done.stdout.strip() == ""
