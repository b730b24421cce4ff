"""Attention over paged KV for packed batches, called by transformers models through their attention interface.

``KVStep`` is one step's view of the pool. It travels to every layer as the keyword argument ``kv_step`` of the
model's forward, so several models can run in one process: the only global is the name of the function.
The code is the same on every device; it has been run on CPU only.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from dflash2.engine.batch import StepBatch
from dflash2.engine.paged_pool import GatherWorkspace, PagedPool
from dflash2.errors import ModelError
from dflash2.types import KVLayout

ATTENTION_NAME = "paged_kv_blocks"
"""transformers takes any name with "flash" in it for a kernel to download, so the project's name cannot be used."""

GATHER_BYTES = 1 << 20
"""Short sequences are gathered together up to this many bytes of K; a longer one alone, so that it stays in cache."""


@dataclass(frozen=True, slots=True)
class Segment:
    """One sequence's share of the step.

    Attributes:
        start: first token in the packed batch.
        length: new tokens.
        context: tokens to attend to, new ones included.
        first_block: where its blocks begin in the step's concatenated block tables.
        num_blocks: how many there are.
    """

    start: int
    length: int
    context: int
    first_block: int
    num_blocks: int

    @property
    def span(self) -> slice:
        """Its tokens in the packed batch."""
        return slice(self.start, self.start + self.length)

    @property
    def reads_pool(self) -> bool:
        """False for a prompt without earlier context: its K and V are the layer's own."""
        return self.context > self.length


@dataclass(frozen=True, slots=True)
class Gather:
    """Neighbouring segments whose blocks are gathered with one copy per layer, K and V.

    Attributes:
        rows: per layer, the pool's rows of K and of V, each int64 ``[n]``.
        buffers: where they go: K and V, ``[n, block_width]``.
        members: each segment with its part of the buffers, ``[1, num_kv_heads, context, head_dim]``.
    """

    rows: list[tuple[torch.Tensor, torch.Tensor]]
    buffers: tuple[torch.Tensor, torch.Tensor]
    members: list[tuple[Segment, torch.Tensor, torch.Tensor]]


class KVStep:
    """Where the tokens of one step are written to and which blocks they attend to; the same for every layer.

    Args:
        pool: the paged pool.
        workspace: scratch memory, used by one step at a time.
        batch: the packed batch. Block tables may be longer than the context needs.

    Raises:
        ValueError: a context is shorter than its new tokens, a block table too short, a slot outside the pool, or a
            position not where the context's new tokens are.
    """

    def __init__(self, pool: PagedPool, workspace: GatherWorkspace, batch: StepBatch) -> None:
        self._pool = pool
        self._masks: dict[tuple[int, int], torch.Tensor] = {}
        segments = list(_segments(batch, pool.layout))
        tables = [table[: s.num_blocks] for s, table in zip(segments, batch.block_tables, strict=True)]
        slots = np.concatenate(tables).astype(np.int64)
        if slots.min() < 0 or slots.max() >= pool.num_slots:
            raise ValueError(f"a block table names a slot outside the pool of {pool.num_slots}")
        positions = np.concatenate([np.arange(s.context - s.length, s.context) for s in segments])
        if not np.array_equal(positions, batch.positions):
            raise ValueError("positions are not those of each context's last tokens")
        first_blocks = np.repeat([s.first_block for s in segments], batch.query_lens)
        block_of_token = first_blocks + positions // pool.layout.block_size
        self._write_rows = pool.rows_of_tokens(slots[block_of_token], positions % pool.layout.block_size)
        self._work = _plan(segments, pool, workspace, pool.rows_of_blocks(slots))

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float | None
    ) -> torch.Tensor:
        """Store the new K and V of one layer, then attend.

        Args:
            query: ``[1, num_heads, T, head_dim]``.
            key: ``[1, num_kv_heads, T, head_dim]``, value alike.
            scaling: factor of the scores; None for ``head_dim ** -0.5``.

        Returns:
            ``[1, T, num_heads, head_dim]``.
        """
        self._store(layer, key, value)
        parts: list[torch.Tensor] = []
        for item in self._work:
            if isinstance(item, Segment):
                parts.append(self._attend_one(item, query, key[:, :, item.span], value[:, :, item.span], scaling))
                continue
            for rows, buffer in zip(item.rows[layer], item.buffers, strict=True):
                torch.index_select(self._pool.block_rows, 0, rows, out=buffer)
            parts.extend(self._attend_one(s, query, keys, values, scaling) for s, keys, values in item.members)
        return (parts[0] if len(parts) == 1 else torch.cat(parts)).unsqueeze(0)

    def _store(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> None:
        width = self._pool.token_rows.shape[1]
        for rows, new in zip(self._write_rows[layer], (key, value), strict=True):
            self._pool.token_rows.index_copy_(0, rows, new[0].transpose(0, 1).reshape(-1, width))

    def _attend_one(
        self, s: Segment, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float | None
    ) -> torch.Tensor:
        """Attention of one sequence alone, so that its result does not depend on the rest of the batch.

        Returns:
            ``[s.length, num_heads, head_dim]``.
        """
        _, num_heads, _, head_dim = query.shape
        if s.length == 1:
            # A new token sees everything, so the heads that share K and V become rows of one query: no mask, no copy.
            rows = query[0, :, s.start].reshape(1, key.shape[1], -1, head_dim)
            return F.scaled_dot_product_attention(rows, key, value, scale=scaling).reshape(1, num_heads, head_dim)
        out = F.scaled_dot_product_attention(
            query[:, :, s.span],
            key,
            value,
            attn_mask=self._mask(s, query) if s.reads_pool else None,
            is_causal=not s.reads_pool,
            scale=scaling,
            enable_gqa=True,
        )
        return out[0].transpose(0, 1)

    def _mask(self, s: Segment, query: torch.Tensor) -> torch.Tensor:
        """Additive causal mask ``[length, context]`` for new tokens at the end of the context; made once per step."""
        size = (s.length, s.context)
        if size not in self._masks:
            full = torch.full(size, float("-inf"), dtype=query.dtype, device=query.device)
            self._masks[size] = full.triu_(s.context - s.length + 1)
        return self._masks[size]


def _segments(batch: StepBatch, layout: KVLayout) -> Iterator[Segment]:
    start = first_block = 0
    lens = zip(batch.query_lens.tolist(), batch.context_lens.tolist(), batch.block_tables, strict=True)
    for i, (length, context, table) in enumerate(lens):
        num_blocks = layout.num_blocks(context)
        if not 0 < length <= context:
            raise ValueError(f"sequence {i} has {length} new tokens in a context of {context}")
        if len(table) < num_blocks:
            raise ValueError(f"sequence {i} needs {num_blocks} blocks, its table has {len(table)}")
        yield Segment(start, length, context, first_block, num_blocks)
        start += length
        first_block += num_blocks


def _plan(
    segments: list[Segment], pool: PagedPool, workspace: GatherWorkspace, rows: torch.Tensor
) -> list[Segment | Gather]:
    """The step's work in packed order: prompts without earlier context by themselves, the rest in gathers."""
    limit = GATHER_BYTES // (pool.block_rows.shape[1] * pool.block_rows.element_size())
    runs: list[list[Segment]] = []
    for s in segments:
        joins = runs and s.reads_pool and runs[-1][0].reads_pool
        if joins and s.first_block + s.num_blocks - runs[-1][0].first_block <= limit:
            runs[-1].append(s)
        else:
            runs.append([s])
    workspace.reserve(max(sum(s.num_blocks for s in run) for run in runs))
    return [_gather(run, pool, workspace, rows) if run[0].reads_pool else run[0] for run in runs]


def _gather(run: list[Segment], pool: PagedPool, workspace: GatherWorkspace, rows: torch.Tensor) -> Gather:
    begin, end = run[0].first_block, run[-1].first_block + run[-1].num_blocks
    layout = pool.layout
    buffers = workspace.take(end - begin)
    keys, values = (b.view(1, -1, layout.num_kv_heads, layout.head_dim).transpose(1, 2) for b in buffers)
    members = []
    for s in run:
        first = (s.first_block - begin) * layout.block_size
        members.append((s, keys[:, :, first : first + s.context], values[:, :, first : first + s.context]))
    halves = rows[:, :, begin:end].contiguous().unbind(1)
    return Gather(list(zip(halves[0].unbind(0), halves[1].unbind(0), strict=True)), buffers, members)


def _paged_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    *,
    kv_step: KVStep | None = None,
    **unused: Any,
) -> tuple[torch.Tensor, None]:
    """What transformers calls in every layer."""
    if kv_step is None:
        raise ModelError("this model is set to paged attention: run it through ModelRunner, which passes kv_step")
    layer: Any = module.layer_idx
    return kv_step.attend(layer, query, key, value, scaling), None


def _no_mask(*args: Any, **kwargs: Any) -> None:
    """Causality follows from each sequence's positions, so transformers need not build a mask."""


def register() -> None:
    """Make ``ATTENTION_NAME`` known to transformers. Idempotent, and holds no state."""
    ALL_ATTENTION_FUNCTIONS.register(ATTENTION_NAME, _paged_attention)
    ALL_MASK_ATTENTION_FUNCTIONS.register(ATTENTION_NAME, _no_mask)
