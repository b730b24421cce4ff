"""What the cache manager asks of the data path, and what it is told back.

One thread owns the page table. It submits copies and polls for what has ended; worker threads only move
bytes and never touch the table. A destination slot belongs to the copy until its completion is polled.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from dflash2.types import BoolArray, IntArray, Tier, Urgency

LEAST_BURST_BYTES = 16 * 1024 * 1024
"""A millisecond between HBM and DRAM, a few to NVMe. Small blocks would otherwise take as long to begin as to move."""


def burst_blocks(batch_blocks: int, block_bytes: int) -> int:
    """Most blocks moved as one burst: ``swap_batch_size``; more where blocks are small."""
    return max(batch_blocks, LEAST_BURST_BYTES // block_bytes)


class LayerWatcher(Protocol):
    """Told by the lane's thread how far a load has come, so that a model's first layer need not wait for its last."""

    def arrived(self, layer: int) -> None:
        """This layer of every block of the job is in place."""
        ...

    def ended(self, ok: bool) -> None:
        """The job is over; not ok: no further layer will arrive."""
        ...


@dataclass(frozen=True, slots=True)
class CopyJob:
    """Copy blocks between two different tiers. Nothing else moves bytes.

    Attributes:
        src: tier to read from.
        dst: tier to write to.
        src_slots: int32 ``[n]``, distinct.
        dst_slots: int32 ``[n]``, distinct; owned by this job until its completion has been polled.
        keys: uint8 ``[n, KEY_BYTES]`` content keys for the NVMe headers, or None when the blocks have no
            identity (a mutable tail block that is only swapped); such slots are never adopted at a restart.
        urgency: which budget pays, and who waits for whom.
        ready: called by the lane's thread before it reads the source; returns when the device has written it. Must
            not raise. None: the bytes are there.
        layers: for a load whose reader goes layer by layer; the job is then moved as one batch, layer after layer
            where the destination can (``pools.base.LayerWise``).
    """

    src: Tier
    dst: Tier
    src_slots: IntArray
    dst_slots: IntArray
    urgency: Urgency
    keys: npt.NDArray[np.uint8] | None = None
    ready: Callable[[], None] | None = None
    layers: LayerWatcher | None = None


@dataclass(frozen=True, slots=True)
class Completion:
    """The end of one job, reported exactly once.

    Attributes:
        ticket: what ``submit`` returned.
        job: the job itself.
        ok: bool ``[n]``; True where the bytes arrived complete and verified. False means: treat the
            destination as empty and, where ``bad_source`` is also True, the source as lost.
        bad_source: bool ``[n]``; the source copy cannot be trusted or read (checksum, EIO, truncated).
        wall_s: seconds from start to end.
    """

    ticket: int
    job: CopyJob
    ok: BoolArray
    bad_source: BoolArray
    wall_s: float


class TransferEngine(Protocol):
    """Moves batches of blocks. All methods are called from the thread that owns the page table."""

    def submit(self, job: CopyJob) -> int:
        """Queue a job and return its ticket. Never blocks and never fails because of I/O."""
        ...

    def poll(self) -> list[Completion]:
        """Completions since the last call, in the order in which they ended. Never blocks."""
        ...

    def wait(self, tickets: list[int], timeout_s: float) -> bool:
        """Block until all ``tickets`` have ended or the time is up; completions are still fetched by ``poll``.

        Returns:
            True if all have ended.
        """
        ...

    def cancel(self, ticket: int) -> bool:
        """Drop a job that has not started; it is then reported with ``ok`` all False, ``bad_source`` all False.

        Returns:
            False if it runs already or has ended (its completion comes as usual).
        """
        ...

    def close(self, timeout_s: float) -> None:
        """Finish what runs within the deadline, cancel the rest, stop the threads. Idempotent."""
        ...

    @property
    def is_pressed(self) -> bool:
        """NVMe is much slower than it can be, or has had its writes for the day: leave undone what nobody needs."""
        ...

    def check_integrity(self) -> None:
        """Raise IntegrityError if staging or queue accounts do not add up."""
        ...
