"""The demo in small, with the real model: same answers in all settings, swapped and not recomputed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dflash2.demo.run import run_demo
from dflash2.demo.settings import DemoSize


@pytest.mark.e2e
@pytest.mark.timeout(900)  # three engines, one after the other, on one thread
def test_the_demo_in_small(model_path: Path, tmp_path: Path) -> None:
    size = DemoSize(num_chats=4, num_turns=2, context_tokens=288, output_tokens=8, block_size=16)
    nvme = tmp_path / "nvme"
    nvme.mkdir()
    assert run_demo(str(model_path), size, tmp_path / "out" / "demo.json", nvme)
    assert list(nvme.iterdir()) == []
    result = json.loads((tmp_path / "out" / "demo.json").read_text())
    assert result["identical"] is True
    settings = result["settings"]
    assert {name: one["output_tokens"] for name, one in settings.items()} == dict.fromkeys(settings, 4 * 2 * 8)
    ours = settings["dflash2"]
    assert ours["recomputed_tokens"] == 0 and settings["recompute"]["recomputed_tokens"] > 0
    assert ours["preemptions_swapped"] > 0
    assert ours["swap_in_bytes"] > 0 and ours["swap_out_bytes"] > 0
    assert ours["kv_working_set_bytes"] >= 4 * ours["hbm_pool_bytes"]
    assert ours["peak_running_kv_bytes"] >= 1.5 * ours["hbm_pool_bytes"]
