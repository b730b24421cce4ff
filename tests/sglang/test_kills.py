"""SIGKILL in the middle of demotions, again and again: it starts, never answers wrong, and the disk stays small."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import random
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from tests.sglang.conftest import PYTHON
from tests.sglang.server import Server
from tests.sglang.traffic import Conversations, Traffic, Turn

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(7200)]

NUM_KILLS = 2 * int(os.environ.get("DFLASH2_TEST_SCALE", "1"))
NVME_MB = 4
"""Less than the KV of all chats: demotions never end."""
HEADERS_MB = 1
FOUND_AGAIN = "blocks of an earlier run found on NVMe"
POLL_S = 0.002
PATIENCE_POLLS = 100_000
"""A server that has demoted nothing by then was not killed in the middle of anything: the test fails."""


def test_kills_in_the_middle_of_demotions(tmp_path: Path, tiny_model: Path) -> None:
    config, folder = tmp_path / "config.json", tmp_path / "nvme"
    memory = {"hbm_capacity_mb": 1, "dram_capacity_mb": 1, "nvme_capacity_mb": NVME_MB, "staging_buffer_size_mb": 1}
    policy = {"swap_batch_size": 4}
    config.write_text(
        json.dumps(
            {
                "enable": True,
                "memory": {**memory, "nvme_path": str(folder)},
                "kv_block": {"block_size": 16},
                "policy": policy,
            }
        )
    )
    plain = Server(PYTHON, str(tiny_model), tmp_path / "plain", "--max-total-tokens", "32768", "--page-size", "16")
    try:
        chats = Conversations(plain.wait(), num_chats=24, num_turns=2, prompt_tokens=200, num_new=4, at_once=3)
    finally:
        plain.kill()
    rng = random.Random(5)
    answered = 0
    for kill in range(NUM_KILLS):
        server = Server(PYTHON, str(tiny_model), tmp_path / f"log{kill}", "--dflash2-config", str(config))
        try:
            server.wait()
            assert (FOUND_AGAIN in server.text()) == (kill > 0)
            seen = Traffic()
            with ThreadPoolExecutor(1) as killer:
                killed_in_the_middle = killer.submit(kill_during_demotions, server, folder, rng.uniform(0.0, 1.0))
                send_until_killed(chats, server, seen)
            assert killed_in_the_middle.result()
        finally:
            server.kill()
        assert seen.wrong == []
        assert_small(folder)
        answered += seen.num_tokens // chats.num_new
    assert answered > 0
    server = Server(PYTHON, str(tiny_model), tmp_path / "last", "--dflash2-config", str(config))
    try:
        seen = chats.send(server.wait(), chats.last, 3)
        assert seen.wrong == []
        assert seen.host_tokens > 0
        assert server.metrics_of_rank("0")["nvme_loaded_blocks_total"] > 0
        assert_small(folder)
    finally:
        server.kill()


def send_until_killed(chats: Conversations, server: Server, seen: Traffic) -> None:
    """Replay for ever, three requests at once; whatever is answered before the end is compared."""

    def attempt(turn: Turn) -> None:
        with contextlib.suppress(OSError, http.client.HTTPException, ValueError):  # killed while it answered
            chats.send(server, [turn], 1, seen)

    with ThreadPoolExecutor(3) as clients:
        while server.process.poll() is None:
            for turns in chats.turns:
                list(clients.map(attempt, turns))


def kill_during_demotions(server: Server, folder: Path, delay_s: float) -> bool:
    """Kill it at the moment in which a header is written, ``delay_s`` after the first one of this run.

    Returns:
        False if it wrote none in time.
    """
    (index,) = folder.rglob("index")
    written = wait_for_header(index)
    time.sleep(delay_s)
    written = written and wait_for_header(index)
    server.kill()
    return written


def wait_for_header(index: Path) -> bool:
    """Until the file of headers changes; False if that takes too long."""
    before = index.read_bytes()
    for _ in range(PATIENCE_POLLS):
        if index.read_bytes() != before:
            return True
        time.sleep(POLL_S)
    return False


def assert_small(folder: Path) -> None:
    """Nothing but the files of one rank, within the limit."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    assert sorted(path.name for path in files) == ["data", "index", "lock"]
    assert sum(path.stat().st_size for path in files) <= (NVME_MB + HEADERS_MB) << 20
