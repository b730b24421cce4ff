"""Copies between a CUDA pool and page-locked host rows: one kernel collects a batch, one stream per direction moves it.

The kernel turns the scattered pieces of a batch (``layers * 2`` a block in a layer-first pool) into rows of a device
buffer; from there each run of neighbouring host rows is one asynchronous copy, and back. Each direction has a stream
and a device buffer of its own, so in and out overlap. A call returns when its bytes have arrived, so no later step can
read a half-copied block.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence

import torch
import triton
import triton.language as tl

from dflash2.errors import CapacityError
from dflash2.transfer.plan import Run, merge_runs
from dflash2.transfer.staging import DEVICE_STAGING_BATCHES
from dflash2.types import ByteArray, IntArray

_WORDS_PER_PROGRAM = 1024
_WORD_TYPES = ((8, torch.int64), (4, torch.int32), (2, torch.int16), (1, torch.uint8))


class CudaCopier:
    """See ``pools.base.PieceCopier``. May be shared; calls of one direction wait for each other.

    Args:
        device: CUDA device; a CPU device works where ``TRITON_INTERPRET=1`` is set, to check the kernel without a GPU.
        batch_blocks: most blocks of a batch (``swap_batch_size``); larger calls are cut.
        block_bytes: payload of a block; ``2 * batch_blocks * block_bytes`` bytes of device memory are taken at once.
        compute_stream: the stream on which steps write KV; copies begin after what it has queued. None: the default.

    Raises:
        CapacityError: the device memory cannot be had.
    """

    def __init__(
        self,
        device: torch.device | str,
        batch_blocks: int,
        block_bytes: int,
        compute_stream: torch.cuda.Stream | None = None,
    ) -> None:
        self._device = torch.device(device)
        self._batch_blocks = batch_blocks
        try:
            buffers = torch.empty(
                (DEVICE_STAGING_BATCHES, batch_blocks, block_bytes), dtype=torch.uint8, device=self._device
            )
        except torch.OutOfMemoryError as error:
            need = DEVICE_STAGING_BATCHES * batch_blocks * block_bytes
            raise CapacityError(f"cannot take {need} bytes of device staging: {error}") from error
        self._outwards = _Direction(buffers[0], compute_stream)
        self._inwards = _Direction(buffers[1], compute_stream)

    def gather(self, pieces: Sequence[torch.Tensor], slots: IntArray, buffer: ByteArray, rows: IntArray) -> None:
        """Device to host rows."""
        host = torch.from_numpy(buffer)
        for part in self._parts(slots):
            runs = merge_runs(slots[part], rows[part])
            with self._outwards.turn() as staging:
                _move(pieces, _slots_of(runs, self._device), staging, inwards=False)
                for device_rows, host_rows in _pairs(runs, staging, host):
                    host_rows.copy_(device_rows, non_blocking=True)

    def scatter(self, pieces: Sequence[torch.Tensor], slots: IntArray, buffer: ByteArray, rows: IntArray) -> None:
        """Host rows to device."""
        host = torch.from_numpy(buffer)
        for part in self._parts(slots):
            runs = merge_runs(slots[part], rows[part])
            with self._inwards.turn() as staging:
                for device_rows, host_rows in _pairs(runs, staging, host):
                    device_rows.copy_(host_rows, non_blocking=True)
                _move(pieces, _slots_of(runs, self._device), staging, inwards=True)

    def _parts(self, slots: IntArray) -> list[slice]:
        return [slice(i, i + self._batch_blocks) for i in range(0, len(slots), self._batch_blocks)]


class _Direction:
    """A device buffer and the stream that fills or empties it."""

    def __init__(self, staging: torch.Tensor, compute_stream: torch.cuda.Stream | None) -> None:
        self._staging = staging
        self._compute_stream = compute_stream
        self._stream = torch.cuda.Stream(staging.device) if staging.is_cuda else None  # type: ignore[no-untyped-call]
        self._lock = threading.Lock()

    @contextlib.contextmanager
    def turn(self) -> Iterator[torch.Tensor]:
        """The buffer, on the stream; at the end everything queued inside has happened."""
        with self._lock:
            if self._stream is None:
                yield self._staging
                return
            compute = self._compute_stream or torch.cuda.default_stream(self._staging.device)
            with torch.cuda.stream(self._stream):
                self._stream.wait_stream(compute)
                yield self._staging
            self._stream.synchronize()


def page_lock(address: int, nbytes: int) -> Callable[[], None]:
    """Page-lock host memory for CUDA (a ``pools.page_memory.PageLock``).

    Raises:
        CapacityError: the driver refuses, most often because of ``ulimit -l``.
    """
    runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    status = int(runtime.cudaHostRegister(address, nbytes, 0))
    if status != 0:
        raise CapacityError(f"cannot page-lock {nbytes} bytes (CUDA error {status}); look at ulimit -l")

    def unlock() -> None:
        runtime.cudaHostUnregister(address)

    return unlock


def _slots_of(runs: list[Run], device: torch.device) -> torch.Tensor:
    """Slots in the order of the staging rows."""
    return torch.tensor([slot for run in runs for slot in run.src], dtype=torch.int64, device=device)


def _pairs(runs: list[Run], staging: torch.Tensor, host: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """For each run its staging rows and its host rows; ``run.dst`` is a host row."""
    start, width = 0, staging.shape[1]
    for run in runs:
        stop = start + len(run.src)
        yield staging[start:stop], host[run.dst : run.dst + stop - start, :width]
        start = stop


def _move(pieces: Sequence[torch.Tensor], slots: torch.Tensor, staging: torch.Tensor, inwards: bool) -> None:
    """``staging[i] = concat(piece[slots[i]] for piece in pieces)`` in one launch, or its inverse.

    Args:
        pieces: uint8 ``[num_slots, piece_bytes]`` each, contiguous, all of one shape.
        slots: int64 ``[n]`` on the device, n at least 1.
        staging: uint8 ``[m, block_bytes]``, m at least n, contiguous.
        inwards: from staging to the pieces.
    """
    word_bytes, dtype = _widest_word(pieces, staging)
    addresses = torch.tensor([piece.data_ptr() for piece in pieces], dtype=torch.int64, device=staging.device)
    piece_words = pieces[0].shape[1] // word_bytes
    words = staging.view(dtype)
    grid = (len(slots), len(pieces), triton.cdiv(piece_words, _WORDS_PER_PROGRAM))
    _move_rows[grid](addresses, slots, words, piece_words, words.stride(0), INWARDS=inwards, WORDS=_WORDS_PER_PROGRAM)


def _widest_word(pieces: Sequence[torch.Tensor], staging: torch.Tensor) -> tuple[int, torch.dtype]:
    """The widest word in which every address and size is whole."""
    numbers = [piece.data_ptr() for piece in pieces] + [pieces[0].shape[1], staging.data_ptr(), staging.stride(0)]
    return next((size, dtype) for size, dtype in _WORD_TYPES if all(number % size == 0 for number in numbers))


@triton.jit  # type: ignore[untyped-decorator]
def _move_rows(  # type: ignore[no-untyped-def]
    piece_addresses,
    slots,
    staging,
    piece_words,
    staging_stride_words,
    INWARDS: tl.constexpr,  # noqa: N803 - constexpr arguments are upper case in Triton
    WORDS: tl.constexpr,  # noqa: N803
):
    """Program (row, piece, chunk) moves ``WORDS`` words between piece[slots[row]] and staging[row]."""
    row = tl.program_id(0).to(tl.int64)
    piece = tl.program_id(1).to(tl.int64)
    at = tl.program_id(2) * WORDS + tl.arange(0, WORDS)
    mask = at < piece_words
    base = tl.load(piece_addresses + piece).to(tl.pointer_type(staging.dtype.element_ty))
    device_at = base + tl.load(slots + row) * piece_words + at
    staging_at = staging + row * staging_stride_words + piece * piece_words + at
    if INWARDS:
        tl.store(device_at, tl.load(staging_at, mask=mask), mask=mask)
    else:
        tl.store(staging_at, tl.load(device_at, mask=mask), mask=mask)
