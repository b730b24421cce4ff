"""A running request is retracted, and comes back with its KV."""

from __future__ import annotations

import json
import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from tests.sglang.conftest import PYTHON
from tests.sglang.server import Server

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(1200)]

NUM_REQUESTS, PROMPT_TOKENS, NUM_NEW = 3, 70, 120


def test_a_retracted_request_is_not_computed_again(
    tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # SGLang's own switch for tests: every so many steps it retracts as if the device were full.
    monkeypatch.setenv("SGLANG_TEST_RETRACT", "1")
    monkeypatch.setenv("SGLANG_TEST_RETRACT_INTERVAL", "25")
    config = tmp_path / "config.json"
    memory = {"hbm_capacity_mb": 1, "dram_capacity_mb": 8, "staging_buffer_size_mb": 1}
    config.write_text(json.dumps({"enable": True, "memory": memory, "kv_block": {"block_size": 16}}))
    server = Server(PYTHON, str(tiny_model), tmp_path / "log", "--dflash2-config", str(config))
    rng = random.Random(3)
    prompts = [[rng.randrange(1000, 40000) for _ in range(PROMPT_TOKENS)] for _ in range(NUM_REQUESTS)]
    try:
        server.wait()
        with ThreadPoolExecutor(NUM_REQUESTS) as clients:
            together = list(clients.map(lambda prompt: server.generate(prompt, NUM_NEW, logprobs=False), prompts))
        metrics = server.metrics_of_rank("0")
        retractions = server.text().count("dflash2_swap retraction")
        assert retractions > 0
        found = sum(metrics[f"prefix_hit_tokens_total.{tier}"] for tier in ("hbm", "dram"))
        # No prompt was sent twice, so only the retracted find anything: more than their prompts, their answers too.
        assert found > retractions * PROMPT_TOKENS
        server.post("/flush_cache")
        for prompt, answer in zip(prompts, together, strict=True):
            assert server.generate(prompt, NUM_NEW, logprobs=False)["output_ids"] == answer["output_ids"]
    finally:
        server.kill()
