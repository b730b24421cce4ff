"""A tiny model served by the reference engine on a device, with little and with ample HBM."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from tests.engine.paged_case import VOCAB, tiny_model

from dflash2.config import Config
from dflash2.engine.base import FinishReason, GenerationRequest
from dflash2.engine.factory import assemble_engine
from dflash2.engine.fingerprint import model_fingerprint
from dflash2.engine.model_loader import LoadedModel
from dflash2.engine.sampling import SamplingParams

NUM_REQUESTS, PROMPT_TOKENS, NEW_TOKENS = 8, 120, 30
"""152 blocks in all."""


def tiny_loaded(device: str) -> LoadedModel:
    """A block of 8 tokens is 16 KiB: 64 of them in 1 MiB."""
    model = tiny_model(hidden_size=128, num_key_value_heads=4, head_dim=32).to(device).requires_grad_(False)
    return LoadedModel(model, "tiny", "float32", model_fingerprint(model))


def answers(loaded: LoadedModel, path: Path, hbm_mb: int) -> tuple[list[list[int]], dict[str, int]]:
    """What every request is answered, and the counters of cache and scheduler; all run at the same time."""
    memory = {"hbm_reserve_mb": 1024, "hbm_capacity_mb": hbm_mb, "dram_capacity_mb": 1, "nvme_capacity_mb": 8}
    sections = {
        "memory": {**memory, "nvme_path": str(path), "staging_buffer_size_mb": 1},
        "kv_block": {"block_size": 8},
        "policy": {"swap_batch_size": 4},
        "scheduling": {"smoothing": False, "quantum_tokens": 4},
    }
    engine = assemble_engine(loaded, Config.model_validate({"enable": True, **sections}))
    said: dict[str, list[int]] = {}
    for number, prompt in enumerate(np.random.default_rng(1).integers(0, VOCAB, (NUM_REQUESTS, PROMPT_TOKENS))):
        said[f"q{number}"] = []
        sampling = SamplingParams(max_tokens=NEW_TOKENS, temperature=0.0)
        engine.add(GenerationRequest(f"q{number}", prompt.astype(np.int32), sampling, 0.0))
    while engine.has_work:
        for output in engine.step():
            assert output.finish_reason in (None, FinishReason.LENGTH), output
            if output.token_id is not None:
                said[output.request_id].append(output.token_id)
    stats = engine.stats()
    engine.close()
    return list(said.values()), {**stats["counters"], **stats["scheduler"]}
