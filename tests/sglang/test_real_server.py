"""The plug-in in SGLang's real server with a real model, under pressure, with many requests at once, across a kill."""

from __future__ import annotations

import json
import os
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.sglang.conftest import MODEL, PYTHON
from tests.sglang.server import Server, free_port
from tests.sglang.traffic import Conversations

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(3600)]

SCALE = int(os.environ.get("DFLASH2_TEST_SCALE", "1"))
NUM_CHATS, NUM_TURNS, PROMPT_TOKENS, NUM_NEW, AT_ONCE = min(16 * SCALE, 50), 4, 100, 8, 4
BLOCK = 16
KIB_PER_TOKEN = 45  # 30 layers x 2 x 3 heads x 64 x 4 bytes
HBM_MB = 36
TOKENS_PER_TIE = 10_000


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("sglang")


@pytest.fixture(scope="module")
def page_port() -> int:
    return free_port()


@pytest.fixture(scope="module")
def config(place: Path, page_port: int) -> Path:
    path = place / "dflash2_config.json"
    memory = {"hbm_capacity_mb": HBM_MB, "dram_capacity_mb": 48, "nvme_capacity_mb": 32 * NUM_CHATS}
    memory |= {"nvme_path": str(place / "nvme"), "staging_buffer_size_mb": 8}
    block, policy = {"block_size": BLOCK}, {"swap_batch_size": 8}
    sections = {"memory": memory, "kv_block": block, "policy": policy}
    path.write_text(json.dumps({"enable": True, "page_port": page_port, **sections}))
    return path


@pytest.fixture(scope="module")
def chats(place: Path) -> Conversations:
    """From plain SGLang, with the plug-in installed and not asked for."""
    server = Server(PYTHON, MODEL, place / "plain.log", "--max-total-tokens", "16384", "--page-size", str(BLOCK))
    try:
        found = Conversations(server.wait(), NUM_CHATS, NUM_TURNS, PROMPT_TOKENS, NUM_NEW, AT_ONCE)
        assert "DFlash2" not in server.text().replace("dflash2", "")
        return found
    finally:
        server.kill()


@pytest.fixture(scope="module")
def first_run(place: Path, config: Path) -> Iterator[Server]:
    server = Server(PYTHON, MODEL, place / "first.log", "--dflash2-config", str(config))
    yield server.wait()
    server.kill()


def test_outputs_are_those_of_plain_sglang_and_come_from_all_tiers(
    chats: Conversations, first_run: Server, page_port: int
) -> None:
    capacity = HBM_MB * 1024 // KIB_PER_TOKEN
    lengths = [len(turn.prompt) for turn in chats.last]
    assert max(lengths) + NUM_NEW < capacity < sum(lengths) / 4
    seen = chats.replay(first_run, AT_ONCE)
    assert seen.wrong == []
    assert seen.ties <= seen.num_tokens / TOKENS_PER_TIE + 1
    assert seen.host_tokens > 0
    metrics = first_run.metrics_of_rank("0")
    assert metrics["swap_blocks_total.in"] > 0
    assert metrics["prefix_hit_tokens_total.dram"] > 0
    assert metrics["nvme_loaded_blocks_total"] > 0
    assert metrics["failed_copies_total"] == 0
    with urllib.request.urlopen(f"http://127.0.0.1:{page_port}/dflash2/stats", timeout=60) as answer:
        stats = json.load(answer)
    assert stats["counters"]["swap_in_blocks"] == metrics["swap_blocks_total.in"]
    text = first_run.text()
    assert "DFlash2: enabled, total virtual cache size" in text
    assert "dflash2_swap" in text


def test_a_killed_server_finds_its_blocks_again(
    chats: Conversations, first_run: Server, place: Path, config: Path
) -> None:
    first_run.kill()
    server = Server(PYTHON, MODEL, place / "second.log", "--dflash2-config", str(config))
    try:
        server.wait()
        assert "blocks of an earlier run found on NVMe" in server.text()
        seen = chats.send(server, chats.last, AT_ONCE)
        assert seen.wrong == []
        assert seen.host_tokens > 0
        assert server.metrics_of_rank("0")["nvme_loaded_blocks_total"] > 0
        server.post("/flush_cache")
        seen = chats.send(server, chats.last[:1], 1)
        assert (seen.wrong, seen.cached_tokens) == ([], 0)
    finally:
        server.kill()
