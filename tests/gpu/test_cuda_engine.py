"""The reference engine with model and pool on a real CUDA device, as ``dflash2 serve --device cuda`` builds it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")
if not torch.cuda.is_available():
    pytest.skip("no CUDA device", allow_module_level=True)

from tests.engine.device_case import NEW_TOKENS, answers, tiny_loaded

from dflash2.build import create_runtime
from dflash2.config import Config
from dflash2.pools.tensor import total_device_bytes
from dflash2.table.keys import KeyNamespace
from dflash2.types import MIB, KVLayout, Tier


def test_with_little_hbm_the_answers_are_those_with_ample(tmp_path: Path) -> None:
    loaded = tiny_loaded("cuda")
    ample, unmoved = answers(loaded, tmp_path / "ample", hbm_mb=8)
    short, moved = answers(loaded, tmp_path / "short", hbm_mb=1)
    assert short == ample and {len(answer) for answer in short} == {NEW_TOKENS}
    assert unmoved["preemptions_swapped"] == 0
    assert moved["preemptions_swapped"] > 0 and moved["loaded_from_nvme_blocks"] > 0
    assert moved["failed_copies"] == moved["recomputed_tokens"] == 0


def test_what_is_not_reserved_is_the_pool(tmp_path: Path) -> None:
    """All but 2 GiB is reserved; what torch holds already, as weights would be, is part of that."""
    weights = torch.zeros(512 * MIB, dtype=torch.uint8, device="cuda")
    total = total_device_bytes("cuda")
    assert total is not None
    memory = {"hbm_reserve_mb": total // MIB - 2048, "dram_capacity_mb": 64, "staging_buffer_size_mb": 16}
    layout = KVLayout(num_layers=4, num_kv_heads=8, head_dim=128, block_size=32, dtype="bfloat16")  # 512 KiB a block
    config = Config.model_validate({"enable": True, "memory": memory, "kv_block": {"block_size": 32}})
    runtime = create_runtime(config, layout, KeyNamespace("m", "w", "bfloat16", 32), device="cuda")
    staging = 2 * config.policy.swap_batch_size * layout.block_bytes
    assert runtime.hbm_tensor.is_cuda
    assert 0 <= (2048 * MIB - staging) // layout.block_bytes - runtime.cache.table.capacity(Tier.HBM) <= 2
    assert weights.nbytes == 512 * MIB
    runtime.shutdown()
