"""What must hold between open sequences and the page table."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np

from dflash2.cache.sequence import Residency, Sequence
from dflash2.errors import IntegrityError
from dflash2.table.page_table import BlockState, PageTable
from dflash2.types import Tier


def check_sequences(table: PageTable, sequences: Collection[Sequence], block_size: int) -> None:
    """Raise IntegrityError unless counts, slots and writable blocks are those of the open sequences.

    Args:
        table: page table.
        sequences: all that are open.
        block_size: tokens of a block.
    """
    refs = np.zeros(table.num_rows, np.int64)
    pins = np.zeros(table.num_rows, np.int64)
    for sequence in sequences:
        np.add.at(refs, sequence.block_ids, 1)
        if sequence.residency is not Residency.PAUSED:
            np.add.at(pins, sequence.block_ids, 1)
        if sequence.writable_tokens:
            _check_writable(table, sequence, block_size)
        if sequence.residency is Residency.RESIDENT:
            _check_resident(table, sequence)
    if np.any(refs != table.ref_count) or np.any(pins != table.pin_count):
        raise IntegrityError("reference or pin counts differ from the open sequences")
    private = (table.state == BlockState.OPEN) | (table.state == BlockState.SEALED)
    if np.any(private & (table.ref_count == 0) & (table.busy == 0)):
        raise IntegrityError("a private block that nobody holds was not freed")


def _check_resident(table: PageTable, sequence: Sequence) -> None:
    there = table.has(sequence.block_ids, Tier.HBM)
    same = table.slots_of(sequence.block_ids, Tier.HBM) == sequence.hbm_slots
    if not np.all(there & same):
        raise IntegrityError(f"a block of resident sequence {sequence.request_id} is not where it should be")


def _check_writable(table: PageTable, sequence: Sequence, block_size: int) -> None:
    ids = sequence.block_ids[sequence.num_tokens // block_size :]
    alone = (table.state[ids] == BlockState.OPEN) & (table.ref_count[ids] == 1) & (table.pin_count[ids] == 1)
    only_in_hbm = table.has(ids, Tier.HBM) & ~table.has(ids, Tier.DRAM) & ~table.has(ids, Tier.NVME)
    current = (table.busy[ids] > 0) | only_in_hbm
    if not np.all(alone & current) or sequence.writable_tokens > len(sequence.block_ids) * block_size:
        raise IntegrityError(f"a block that {sequence.request_id} writes to is shared or has a copy")
