"""The three settings are what the demo says they are."""

from __future__ import annotations

from pathlib import Path

import pytest

from dflash2.demo.settings import DemoSize, make_settings
from dflash2.types import MIB, KVLayout

LAYOUT = KVLayout(num_layers=30, num_kv_heads=3, head_dim=64, block_size=32, dtype="float32")


@pytest.mark.parametrize("size", [DemoSize(), DemoSize(num_chats=16, context_tokens=2048)])
def test_the_working_set_is_four_times_hbm_and_more_than_dram_takes(size: DemoSize) -> None:
    configs = make_settings(size, LAYOUT, Path("/somewhere"))
    working_set = size.working_set_tokens * LAYOUT.bytes_per_token
    hbm = [configs[name].memory.hbm_capacity_mb or 0 for name in ("all_hbm", "recompute", "dflash2")]
    slots = [mb * MIB // LAYOUT.block_bytes for mb in hbm]
    assert slots[0] * LAYOUT.block_bytes >= working_set
    assert slots[1] == slots[2]
    assert working_set >= 4 * slots[2] * LAYOUT.block_bytes
    dram = configs["dflash2"].memory.dram_capacity_mb or 0
    assert dram * MIB < working_set - slots[2] * LAYOUT.block_bytes
    assert (hbm[2] + dram + configs["dflash2"].memory.nvme_capacity_mb) * MIB > working_set
    running = {config.scheduling.max_running for config in configs.values()}
    assert len(running) == 1
    assert running.pop() * LAYOUT.num_blocks(size.context_tokens) >= 1.5 * slots[2]
    assert [configs[name].enable for name in configs] == [False, False, True]
