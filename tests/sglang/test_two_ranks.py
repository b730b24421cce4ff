"""Tensor parallel over two CPU ranks with a tiny model: capacities are divided, decisions are the same."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.sglang.conftest import PYTHON
from tests.sglang.server import Server, reference_of

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(1200)]

COUNTERS = ("swap_in_blocks", "prefix_lookup_tokens", "published_blocks", "nvme_loaded_blocks")


def test_two_ranks_decide_alike(tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_CPU_OMP_THREADS_BIND", "0|1")
    memory = {
        "hbm_capacity_mb": 1,
        "dram_capacity_mb": 2,
        "nvme_capacity_mb": 16,
        "nvme_path": str(tmp_path / "nvme"),
        "staging_buffer_size_mb": 1,
    }
    config = tmp_path / "config.json"
    block = {"block_size": 16}
    config.write_text(
        json.dumps({"enable": True, "memory": memory, "kv_block": block, "policy": {"swap_batch_size": 8}})
    )
    server = Server(PYTHON, str(tiny_model), tmp_path / "log", "--tp", "2", "--dflash2-config", str(config))
    try:
        server.wait()
        reference = reference_of(server, num_chats=30, num_turns=1, prompt_tokens=300, num_new=6)
        assert len({tuple(output) for output in reference.outputs}) > len(reference.outputs) // 2
        for _ in range(2):
            seen = reference.compare(server, 6)
            assert seen.wrong == []
            assert seen.host_tokens > seen.num_tokens
        one, other = (server.metrics_of_rank(rank) for rank in ("0", "1"))
        assert one["tier_capacity_blocks.dram"] == other["tier_capacity_blocks.dram"] == 2 * 1024 // 2 // 8
        for name in COUNTERS:
            assert one[f"{name}_total"] == other[f"{name}_total"]
        assert one["nvme_loaded_blocks_total"] > 0
    finally:
        server.kill()
