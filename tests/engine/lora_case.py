"""Adapters that peft makes for the tiny model, and peft's own greedy answers."""

from __future__ import annotations

import copy
import warnings
from pathlib import Path
from typing import Any

import torch

ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def make_adapter(model: Any, folder: Path, seed: int, **options: Any) -> Path:
    """Random weights, large enough to change what is said; saved as peft saves."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from peft import LoraConfig, get_peft_model

        settings = {"r": 4, "lora_alpha": 8, "target_modules": ALL, "task_type": "CAUSAL_LM", **options}
        tuned = get_peft_model(copy.deepcopy(model), LoraConfig(**settings))
        torch.manual_seed(seed)
        with torch.no_grad():
            for name, parameter in tuned.named_parameters():
                if "lora_" in name:
                    parameter.normal_(0.0, 0.3)
        tuned.save_pretrained(str(folder))
    return folder


@torch.inference_mode()
def peft_answer(model: Any, folder: Path | None, prompt: list[int], count: int) -> list[int]:
    """Greedy tokens of peft's own forward, the whole text anew for each."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from peft import PeftModel

        tuned = model if folder is None else PeftModel.from_pretrained(copy.deepcopy(model), str(folder))
    tuned.eval()
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(int(tuned(torch.tensor([tokens]), use_cache=False).logits[0, -1].argmax()))
    return tokens[len(prompt) :]
