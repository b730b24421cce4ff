"""A real server over a real engine with a tiny random model and little HBM."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from tests.engine.paged_case import tiny_config
from tests.server.harness import RunningServer, serving
from transformers import AutoModelForCausalLM

from dflash2.config import Config
from dflash2.engine.engine import ReferenceEngine
from dflash2.engine.factory import assemble_engine
from dflash2.engine.fingerprint import model_fingerprint
from dflash2.engine.model_loader import LoadedModel

VOCAB = 258
"""The tiny tokenizer's: bytes and two special tokens."""


def tiny_loaded(seed: int = 0, **changes: Any) -> LoadedModel:
    """A float32 Llama whose greedy choices are far from a matter of rounding."""
    torch.manual_seed(seed)
    config = tiny_config("llama", vocab_size=VOCAB, **changes)
    model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="sdpa")
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0.0, 0.3)
    model.eval().requires_grad_(False)
    return LoadedModel(model, "tiny", "float32", model_fingerprint(model))


def tiny_engine(loaded: LoadedModel, **sections: dict[str, Any]) -> ReferenceEngine:
    """Blocks of 8 tokens, 1 MiB of HBM, 16 MiB of DRAM, unless said otherwise."""
    memory = {"hbm_capacity_mb": 1, "dram_capacity_mb": 16, "staging_buffer_size_mb": 1}
    given = {"kv_block": {"block_size": 8}, "policy": {"swap_batch_size": 4}, **sections}
    config = Config.model_validate({"enable": True, **given, "memory": {**memory, **sections.get("memory", {})}})
    return assemble_engine(loaded, config)


@contextmanager
def model_serving(engine: ReferenceEngine, **options: Any) -> Iterator[RunningServer]:
    """Serve until the block ends; the engine is closed then."""
    with serving(engine, **options) as server:  # type: ignore[arg-type]
        yield server
        engine_stats = server.get("/dflash2/stats").json()["scheduler"]
        assert engine_stats["resident_requests"] == engine_stats["paused_requests"] == 0
