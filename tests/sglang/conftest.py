"""Real servers of SGLang on a CPU; collected by ``make test-sglang`` only, which names interpreter and model."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

PYTHON = os.environ.get("DFLASH2_SGLANG_PYTHON", "")
MODEL = os.environ.get("DFLASH2_SGLANG_MODEL", "")

collect_ignore_glob = [] if PYTHON and MODEL else ["test_*.py"]


@pytest.fixture
def tiny_model(tmp_path: Path) -> Path:
    """Four layers of random weights: as fast as a server on a shared CPU can be; 1 KiB of KV a token."""
    import torch
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=49152,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
    )
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(3)  # so that the answer depends on the prompt
    path = tmp_path / "tiny"
    model.save_pretrained(path)
    AutoTokenizer.from_pretrained(MODEL).save_pretrained(path)
    return path
