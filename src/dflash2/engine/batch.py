"""One model step as plain arrays: what the scheduler hands to the model runner."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from dflash2.engine.request_state import RequestState
from dflash2.types import BoolArray, IntArray


@dataclass(frozen=True, slots=True)
class StepBatch:
    """A packed batch without padding: sequence after sequence, T tokens of S sequences in all.

    Attributes:
        token_ids: int32 ``[T]``.
        positions: int32 ``[T]``, absolute.
        query_lens: int32 ``[S]``, new tokens of each sequence in this step (1 when decoding).
        context_lens: int32 ``[S]``, tokens of each sequence whose KV exists after this step
            (new ones included), so ``context_lens - query_lens`` are there already.
        block_tables: S int32 vectors of **HBM slots** in sequence order, each covering ``context_lens[i]`` tokens.
        wants_logits: bool ``[S]``; True where the last new token's logits are needed (not for the
            earlier chunks of a chunked prefill).
        adapter_slots: for each of the S sequences the device slot of its LoRA adapter, None for the base model; empty
            where none has an adapter.
    """

    token_ids: IntArray
    positions: IntArray
    query_lens: IntArray
    context_lens: IntArray
    block_tables: list[IntArray]
    wants_logits: BoolArray
    adapter_slots: list[int | None] = field(default_factory=list)


def pack(picked: Mapping[RequestState, int]) -> StepBatch:
    """Put a step together.

    Args:
        picked: resident requests, whose blocks cover their new tokens, with the number of these; at least one.
    """
    first = [state.blocks.num_tokens for state in picked]
    counts = list(picked.values())
    last = [start + count for start, count in zip(first, counts, strict=True)]
    spans = list(zip(picked, first, last, strict=True))
    return StepBatch(
        token_ids=np.concatenate([state.tokens[start:end] for state, start, end in spans]),
        positions=np.concatenate([np.arange(start, end, dtype=np.int32) for _, start, end in spans]),
        query_lens=_ints(counts),
        context_lens=_ints(last),
        block_tables=[state.blocks.hbm_slots for state in picked],
        wants_logits=np.array([end == state.num_tokens for state, _, end in spans], np.bool_),
        adapter_slots=[state.adapter_slot for state in picked],
    )


def _ints(values: list[int]) -> IntArray:
    return np.array(values, np.int32)
