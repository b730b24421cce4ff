"""Fixed sets of threads that take shares of a batch.

File calls block, so a queue depth towards the device comes from threads; and one core copies about half of what the
memory can. One future per block would cost 25 to 40 % at 128 KiB; a share costs one hand-over per thread and batch.
"""

from __future__ import annotations

import itertools
import queue
import threading
from collections.abc import Callable
from functools import partial
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from dflash2.types import BoolArray

Step: TypeAlias = Callable[[npt.NDArray[np.int64]], BoolArray]
"""Moves the blocks at these positions of a batch; returns which of them arrived."""
OnError: TypeAlias = Callable[[Exception], None]


class Shares:
    """The shares of one batch under way.

    Attributes:
        ok: bool ``[n]``, which blocks arrived.
        crashed: bool ``[n]``, blocks of a share that ended in an exception: neither side is known to be at fault.
    """

    def __init__(self, num_blocks: int, num_shares: int) -> None:
        self.ok: BoolArray = np.zeros(num_blocks, dtype=np.bool_)
        self.crashed: BoolArray = np.zeros(num_blocks, dtype=np.bool_)
        self._left = num_shares
        self._done = threading.Condition()

    def finish_one(self) -> None:
        """Called by a worker when its share has ended."""
        with self._done:
            self._left -= 1
            self._done.notify_all()

    def wait(self) -> BoolArray:
        """Block until all shares have ended; bool ``[n]``, which blocks arrived."""
        with self._done:
            self._done.wait_for(lambda: self._left == 0)
        return self.ok


class InlineWorkers:
    """Runs a batch at once, in the caller's thread."""

    def __init__(self, on_error: OnError) -> None:
        self._on_error = on_error

    def start(self, step: Step, num_blocks: int) -> Shares:
        """Run ``step`` over all positions."""
        shares = Shares(num_blocks, 1)
        _run_share(step, np.arange(num_blocks), shares, self._on_error)
        return shares

    def stop(self) -> None:
        """Nothing runs."""

    def join(self, timeout_s: float) -> bool:
        """True: nothing runs."""
        return True


class ThreadWorkers:
    """``num_threads`` daemon threads.

    Args:
        num_threads: most shares of a batch.
        name: prefix of the threads' names.
        on_error: told of an exception in a share, whose blocks then count as failed; the thread lives on.
        caller_works: the caller of ``start`` does a share itself, and ``start`` returns when that has ended.
        min_share_blocks: a batch is not cut into smaller shares than this, where a hand-over would cost more.
    """

    def __init__(
        self, num_threads: int, name: str, on_error: OnError, caller_works: bool = False, min_share_blocks: int = 1
    ) -> None:
        self._on_error = on_error
        self._caller_works = caller_works
        self._min_share_blocks = min_share_blocks
        self._tasks: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._threads = [
            threading.Thread(target=self._run, name=f"{name}-{i}", daemon=True) for i in range(num_threads)
        ]
        for thread in self._threads:
            thread.start()

    def start(self, step: Step, num_blocks: int) -> Shares:
        """Spread ``step`` over the threads, neighbours together."""
        most = len(self._threads) + self._caller_works
        num_shares = min(most, -(-num_blocks // self._min_share_blocks))
        shares = Shares(num_blocks, num_shares)
        positions = np.arange(num_blocks)
        ends = [num_blocks * i // num_shares for i in range(1, num_shares + 1)]
        parts = [positions[start:end] for start, end in itertools.pairwise((0, *ends))]
        own = parts.pop() if parts and self._caller_works else None
        for part in parts:
            self._tasks.put(partial(_run_share, step, part, shares, self._on_error))
        if own is not None:
            _run_share(step, own, shares, self._on_error)
        return shares

    def stop(self) -> None:
        """Let the threads end after what is queued."""
        for _ in self._threads:
            self._tasks.put(None)

    def join(self, timeout_s: float) -> bool:
        """Wait for the threads; False if one still hangs in the device."""
        for thread in self._threads:
            thread.join(timeout_s / len(self._threads))
        return not any(thread.is_alive() for thread in self._threads)

    def _run(self) -> None:
        while (task := self._tasks.get()) is not None:
            task()


def _run_share(step: Step, positions: npt.NDArray[np.int64], shares: Shares, on_error: OnError) -> None:
    try:
        shares.ok[positions] = step(positions)
    except Exception as error:  # noqa: BLE001 - whatever a pool raises, the thread must live and the batch must end
        shares.crashed[positions] = True
        on_error(error)
    finally:
        shares.finish_one()
