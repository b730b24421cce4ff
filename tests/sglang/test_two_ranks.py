"""Tensor parallel over two CPU ranks with a tiny model: capacities are divided, decisions and answers are the same."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from tests.sglang.conftest import PYTHON
from tests.sglang.server import Server
from tests.sglang.traffic import Conversations

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(3600)]

COUNTERS = ("swap_blocks_total.in", "prefix_lookup_tokens_total")
SCALE = int(os.environ.get("DFLASH2_TEST_SCALE", "1"))
NUM_CHATS, NUM_TURNS, AT_ONCE = min(20 * SCALE, 67), 3, 3


def test_two_ranks_decide_alike(tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_CPU_OMP_THREADS_BIND", "0|1")
    memory = {"hbm_capacity_mb": 1, "dram_capacity_mb": 2, "nvme_capacity_mb": NUM_CHATS, "staging_buffer_size_mb": 1}
    memory |= {"nvme_path": str(tmp_path / "nvme")}  # type: ignore[dict-item]
    block, policy = {"block_size": 16}, {"swap_batch_size": 8}
    config = tmp_path / "config.json"
    config.write_text(json.dumps({"enable": True, "memory": memory, "kv_block": block, "policy": policy}))
    plain = Server(PYTHON, str(tiny_model), tmp_path / "plain", "--tp", "2", "--max-total-tokens", "16384")
    try:
        chats = Conversations(plain.wait(), NUM_CHATS, NUM_TURNS, prompt_tokens=160, num_new=6, at_once=AT_ONCE)
    finally:
        plain.kill()
    outputs = {tuple(turn.output) for turns in chats.turns for turn in turns}
    assert len(outputs) > NUM_CHATS * NUM_TURNS // 2
    server = Server(PYTHON, str(tiny_model), tmp_path / "log", "--tp", "2", "--dflash2-config", str(config))
    try:
        server.wait()
        seen = chats.replay(server, AT_ONCE)
        assert seen.wrong == []
        assert seen.host_tokens > seen.num_tokens
        one, other = (server.metrics_of_rank(rank) for rank in ("0", "1"))
        assert one["tier_capacity_blocks.dram"] == other["tier_capacity_blocks.dram"] == 2 * 1024 // 2 // 8
        for name in COUNTERS:
            assert one[name] == other[name]
        # A rank whose disk is slow drops blocks that the other keeps. Both then compute
        # them, and only that rank publishes them again.
        published = [rank["published_blocks_total"] for rank in (one, other)]
        again_at_most = [rank["dropped_blocks_total"] for rank in (one, other)]
        assert abs(published[0] - published[1]) <= max(again_at_most)
        assert one["nvme_loaded_blocks_total"] > 0
    finally:
        server.kill()
