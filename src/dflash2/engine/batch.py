"""One model step as plain arrays: what the scheduler hands to the model runner."""

from __future__ import annotations

from dataclasses import dataclass, field

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
