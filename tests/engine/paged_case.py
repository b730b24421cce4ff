"""Tiny random models and hand-made batches, shared by the tests of paged attention."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from dflash2.engine.batch import StepBatch
from dflash2.engine.model_runner import ModelRunner
from dflash2.engine.model_support import SUPPORTED_MODEL_TYPES
from dflash2.types import IntArray, KVLayout

VOCAB = 97
MODEL_TYPES = SUPPORTED_MODEL_TYPES


def tiny_config(model_type: str = "llama", **changes: Any) -> Any:
    """Two layers, four heads over two KV heads, positions up to 256."""
    fields: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 256,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
    }
    if model_type == "mistral":
        fields["sliding_window"] = None
    return AutoConfig.for_model(model_type, **fields | changes)


def tiny_model(model_type: str = "llama", seed: int = 0, **changes: Any) -> Any:
    """Random float32 weights, wide enough apart that the greedy choice is never a matter of rounding."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(
        tiny_config(model_type, **changes), dtype=torch.float32, attn_implementation="sdpa"
    )
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0.0, 0.3)
    return model.eval()


def tiny_layout(block_size: int = 4) -> KVLayout:
    return KVLayout(2, 2, 8, block_size, "float32")


@dataclass
class Sequence:
    """Tokens that exist and the slots that hold their KV."""

    tokens: list[int]
    table: list[int]
    done: int = 0


@dataclass
class Paged:
    """A runner over a pool full of NaN: whatever is read without having been written shows."""

    model: Any
    block_size: int = 4
    num_slots: int = 64
    pool: torch.Tensor = field(init=False)

    def __post_init__(self) -> None:
        layout = tiny_layout(self.block_size)
        self.pool = torch.full((self.num_slots, *layout.block_shape), float("nan"))
        self.runner = ModelRunner(self.model, self.pool, layout)
        self._free = np.random.default_rng(3).permutation(self.num_slots).tolist()

    def sequence(self, tokens: list[int], room: int = 24, shared: list[int] | None = None) -> Sequence:
        """A sequence with scattered slots for ``room`` more tokens, after ``shared`` slots of another one."""
        table = list(shared or [])
        while len(table) * self.block_size < len(tokens) + room:
            table.append(self._free.pop())
        return Sequence(list(tokens), table, len(shared or []) * self.block_size)

    def step(self, *work: tuple[Sequence, int], wants: list[bool] | None = None) -> torch.Tensor:
        """Compute the next ``n`` tokens of each sequence together."""
        return advance(self.runner, *work, wants=wants)


def advance(runner: ModelRunner, *work: tuple[Sequence, int], wants: list[bool] | None = None) -> torch.Tensor:
    """Run one step and note that its tokens are done."""
    logits = runner.run(batch_of(*work, wants=wants))
    for sequence, n in work:
        sequence.done += n
    return logits


def batch_of(*work: tuple[Sequence, int], wants: list[bool] | None = None) -> StepBatch:
    """The next ``n`` tokens of each sequence as one packed batch."""
    spans = [range(s.done, s.done + n) for s, n in work]
    return StepBatch(
        token_ids=_int32([s.tokens[i] for (s, _), span in zip(work, spans, strict=True) for i in span]),
        positions=_int32([i for span in spans for i in span]),
        query_lens=_int32([n for _, n in work]),
        context_lens=_int32([s.done + n for s, n in work]),
        block_tables=[_int32(s.table) for s, _ in work],
        wants_logits=np.array([True] * len(work) if wants is None else wants),
    )


def prompt(length: int, seed: int) -> list[int]:
    return [int(t) for t in np.random.default_rng(seed).integers(0, VOCAB, length)]


@torch.inference_mode()
def plain_logits(model: Any, tokens: list[int]) -> torch.Tensor:
    """The unmodified model's logits after the last of ``tokens``, ``[V]``."""
    used = model.config._attn_implementation
    model.set_attn_implementation("sdpa")
    logits = model(torch.tensor([tokens]), use_cache=False).logits[0, -1]
    model.set_attn_implementation(used)
    return logits


def _int32(values: list[int]) -> IntArray:
    return np.array(values, dtype=np.int32)
