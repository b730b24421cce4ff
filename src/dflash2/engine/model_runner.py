"""Runs one step: a packed batch through a transformers model, KV in the block pool, logits back."""

from __future__ import annotations

from contextlib import nullcontext

import numpy as np
import torch
from transformers import PreTrainedModel

from dflash2.engine.batch import StepBatch
from dflash2.engine.lora_layers import LoraLayers
from dflash2.engine.paged_attention import ATTENTION_NAME, KVStep, register
from dflash2.engine.paged_pool import GatherWorkspace, PagedPool
from dflash2.types import KVLayout


class ModelRunner:
    """A model bound to a block pool. Nothing is kept between steps but the pool's contents.

    Not re-entrant: one step at a time. Several runners, of the same or of different models, may live in one process.
    The model is switched to paged attention; to use it without a runner again,
    ``model.set_attn_implementation("sdpa")``.

    Args:
        model: a causal decoder accepted by ``model_loader``, on the pool's device.
        kv_pool: ``[num_slots, num_layers, 2, block_size, num_kv_heads, head_dim]``.
        layout: the pool's layout.
        lora: adapters of the model's layers; closed with the runner. None: the base model only.

    Raises:
        ValueError: the pool does not match the layout.
    """

    def __init__(
        self, model: PreTrainedModel, kv_pool: torch.Tensor, layout: KVLayout, lora: LoraLayers | None = None
    ) -> None:
        register()
        model.train(False)
        model.set_attn_implementation(ATTENTION_NAME)
        self._model = model
        self._lora = lora
        self._pool = PagedPool(kv_pool, layout)
        self._workspace = GatherWorkspace(self._pool)

    def run(self, batch: StepBatch) -> torch.Tensor:
        """Compute the batch's new tokens and write their K and V into the pool.

        Returns:
            float32 ``[number of True in wants_logits, vocab_size]`` on the model's device, in batch order: the logits
            after the last new token of each sequence that asks for them.

        Raises:
            ValueError: the batch is inconsistent (see ``KVStep``). The pool is then unchanged.
        """
        adapters = nullcontext() if self._lora is None else self._lora.rows_of(batch)
        with torch.inference_mode(), adapters:
            logits = self._forward(batch)
        # A copy made outside inference mode is an ordinary tensor, which the caller may change in place.
        return logits.to(torch.float32, copy=True)

    def close(self) -> None:
        """Take the adapters off the model. Idempotent."""
        if self._lora is not None:
            self._lora.close()

    def _forward(self, batch: StepBatch) -> torch.Tensor:
        step = KVStep(self._pool, self._workspace, batch)
        last_rows = np.cumsum(batch.query_lens, dtype=np.int64) - 1
        output = self._model(
            input_ids=self._to_device(batch.token_ids.astype(np.int64))[None],
            position_ids=self._to_device(batch.positions.astype(np.int64))[None],
            logits_to_keep=self._to_device(last_rows[batch.wants_logits]),
            use_cache=False,
            kv_step=step,
        )
        logits: torch.Tensor = output.logits[0]
        return logits

    def _to_device(self, array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(array).to(self._pool.device)
