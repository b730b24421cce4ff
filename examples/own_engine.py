"""An engine of your own on DFlash2: a plain transformers model whose KV lives in the runtime's blocks.

    python examples/own_engine.py MODEL.gguf

Four sequences run although the fast pool holds only two: each step brings the blocks of those that take part into
HBM, the others are swapped to DRAM or NVMe and back, and nothing is computed twice. The answers are compared with the
model's own ``generate()``.
"""

from __future__ import annotations

import argparse
import tempfile

import numpy as np
import torch
from transformers import DynamicCache

from dflash2 import Config, KeyNamespace, Runtime, create_runtime
from dflash2.cache.sequence import Sequence
from dflash2.engine.model_loader import load_model, load_tokenizer

PROMPTS = [
    "Write one sentence about the sea, then explain why it is salty.",
    "List three prime numbers and say what makes a number prime.",
    "Tell a very short story about a lighthouse keeper and a storm.",
    "Explain to a child how a bicycle stays upright.",
]
NEW_TOKENS = 40
BLOCK_SIZE = 16


class OwnEngine:
    """One sequence a step, on purpose: the point is what happens to its blocks in between."""

    def __init__(self, model: torch.nn.Module, runtime: Runtime) -> None:
        self.model = model
        self.runtime = runtime
        self.pool: torch.Tensor = runtime.hbm_tensor
        """``[num_slots, num_layers, 2, block_size, num_kv_heads, head_dim]``."""

    def run(self, sequence: Sequence, tokens: np.ndarray) -> int:
        """Compute KV for the tokens that have none yet; return the next token (greedy)."""
        first, new = sequence.num_tokens, tokens[sequence.num_tokens :]
        (slots,) = self.runtime.prepare_step([(sequence, len(new))])
        cache = self._read(slots, first)
        with torch.inference_mode():
            output = self.model(
                input_ids=torch.from_numpy(new.astype(np.int64))[None],
                position_ids=torch.arange(first, len(tokens))[None],
                past_key_values=cache,
            )
        self._write(slots, first, len(tokens), cache)
        self.runtime.complete_step([(sequence, new)])
        return int(output.logits[0, -1].argmax())

    def _read(self, slots: np.ndarray, num_tokens: int) -> DynamicCache:
        cache = DynamicCache(config=self.model.config)
        if num_tokens:
            blocks = self.pool[torch.from_numpy(slots).long()]
            for layer in range(blocks.shape[1]):
                key, value = (blocks[:, layer, part].flatten(0, 1)[:num_tokens] for part in (0, 1))
                cache.update(key.transpose(0, 1)[None], value.transpose(0, 1)[None], layer)
        return cache

    def _write(self, slots: np.ndarray, first: int, end: int, cache: DynamicCache) -> None:
        block_size = self.pool.shape[3]
        positions = torch.arange(first, end)
        rows = torch.from_numpy(slots).long()[positions // block_size]
        for layer, entry in enumerate(cache.layers):
            for part, tensor in enumerate((entry.keys, entry.values)):
                new = tensor[0, :, first:end].transpose(0, 1)
                self.pool[rows, layer, part, positions % block_size] = new


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a model folder or a .gguf file")
    source = parser.parse_args().model
    tokenizer = load_tokenizer(source)
    loaded = load_model(source)
    model = loaded.model

    prompts = [np.array(tokenizer.encode(text), np.int32) for text in PROMPTS]
    expected = []
    for prompt in prompts:
        ids = torch.from_numpy(prompt.astype(np.int64))[None]
        answer = model.generate(ids, max_new_tokens=NEW_TOKENS, do_sample=False, eos_token_id=None, pad_token_id=0)
        expected.append(answer[0].tolist())

    layout = loaded.kv_layout(BLOCK_SIZE)
    longest = max(map(len, prompts)) + NEW_TOKENS
    two_sequences_mb = 2 * layout.num_blocks(longest) * layout.block_bytes // 2**20 + 1
    with tempfile.TemporaryDirectory() as folder:
        config = Config.model_validate(
            {
                "enable": True,
                "memory": {
                    "hbm_capacity_mb": two_sequences_mb,
                    "dram_capacity_mb": two_sequences_mb // 2,
                    "nvme_capacity_mb": 2 * two_sequences_mb,
                    "nvme_path": folder,
                    "staging_buffer_size_mb": 16,
                },
                "kv_block": {"block_size": BLOCK_SIZE},
            }
        )
        namespace = KeyNamespace(source, loaded.fingerprint, layout.dtype, BLOCK_SIZE)
        runtime = create_runtime(config, layout, namespace)
        print(runtime.startup_line())
        engine = OwnEngine(model, runtime)
        tokens = list(prompts)
        sequences = [runtime.open(str(i), prompt, NEW_TOKENS) for i, prompt in enumerate(prompts)]
        for _ in range(NEW_TOKENS):
            for i, sequence in enumerate(sequences):
                tokens[i] = np.append(tokens[i], np.int32(engine.run(sequence, tokens[i])))
                runtime.pause(sequence)  # between two steps its blocks may go anywhere
                runtime.rebalance([], sequences[i + 1 :] + sequences[:i])
        counters = runtime.stats()["counters"]
        for sequence in sequences:
            runtime.close(sequence)
        runtime.check_integrity()
        runtime.shutdown()

    for text, answer in zip(PROMPTS, tokens, strict=True):
        print(f"\n> {text}\n{tokenizer.decode(answer[len(tokenizer.encode(text)) :])}")
    same = [answer.tolist() for answer in tokens] == expected
    print(f"\nblocks swapped in {counters['swap_in_blocks']}, out {counters['swap_out_blocks']}; ", end="")
    print(f"recomputed tokens {counters['recomputed_tokens']}; same answers as generate(): {same}")
    raise SystemExit(0 if same else 1)


if __name__ == "__main__":
    main()
