"""Keeps stores to NVMe from hurting loads: they yield to urgent loads, shrink when the device slows, and have a budget.

A consumer or read-heavy device whose write cache is full takes writes at a fraction of its speed, and reads queue
behind them in the device. What counts is measured time, never an assumed speed.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from dflash2.types import Urgency

_DAY_S = 86_400.0
_LAST_SHARE = 0.01
"""Of the endurance budget; so that the answer to "is it spent?" does not change with every refill."""
_POLL_S = 0.0005
_RECENT_WEIGHT = 0.3
_USUAL_WEIGHT = 0.02
_PRESSED_WEIGHT = 0.001
"""A device that stays slow becomes the usual one, after thousands of batches."""
_PROBE_S = 1.0
"""Back-pressure ends when nothing was stored for so long: the next batch, a small one, shows whether it is over."""
_WORST = 8.0
"""One batch counts as at most so many times as slow as usual: a process that was stopped in between looks worse."""


@dataclass(frozen=True, slots=True)
class PacingOptions:
    """How stores are paced.

    Attributes:
        max_yield_s: longest time that one batch of stores waits for urgent loads, so that demotions never starve.
        slow_factor: back-pressure begins when stores take this many times as long per byte as they usually do.
        recovered_factor: and ends when they take less than this many times as long.
        pressed_batch_bytes: size of a batch under back-pressure, at least one block; one batch is then under way.
        bytes_per_day: endurance budget; None for no limit. A day's budget may be used at once, it refills steadily.
            Running requests may overdraw it, since they have nowhere else to go; then nothing else is stored.
    """

    max_yield_s: float = 0.05
    slow_factor: float = 4.0
    recovered_factor: float = 2.0
    pressed_batch_bytes: int = 4 * 1024 * 1024
    bytes_per_day: int | None = None


class WritePacer:
    """State of the device as the stores see it. ``try_spend`` and ``after_batch`` are called by one thread at a time.

    Args:
        options: see ``PacingOptions``.
        loads_waiting: True while an urgent load is queued or running.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        options: PacingOptions,
        loads_waiting: Callable[[], bool],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._options = options
        self._loads_waiting = loads_waiting
        self._clock = clock
        self._stopping = threading.Event()
        self._usual: float | None = None
        self._recent = 0.0
        self._budget_left = float(options.bytes_per_day or 0)
        self._refilled_at = clock()
        self._slow = False
        self._seen_at = -math.inf

    @property
    def is_pressed(self) -> bool:
        """Back-pressure: whoever may leave a store undone should."""
        return self._slow and self._clock() < self._seen_at + _PROBE_S

    def max_blocks(self, block_bytes: int) -> int | None:
        """Most blocks of the next batch; None for the usual number."""
        return max(1, self._options.pressed_batch_bytes // block_bytes) if self._slow else None

    def before_batch(self, urgency: Urgency) -> None:
        """Wait, within bounds, until the batch may start. A store that a step waits for starts at once."""
        if urgency is Urgency.DEMAND:
            return
        end = time.monotonic() + self._options.max_yield_s
        while self._loads_waiting() and time.monotonic() < end and not self._stopping.wait(_POLL_S):
            pass

    def after_batch(self, num_bytes: int, took_s: float) -> None:
        """Learn from a batch that moved ``num_bytes`` in ``took_s`` of device time."""
        if not num_bytes:
            return
        per_byte = took_s / num_bytes
        if self._usual is None:
            self._usual = self._recent = per_byte
        per_byte = min(per_byte, _WORST * self._usual)
        self._recent += _RECENT_WEIGHT * (per_byte - self._recent)
        self._seen_at = self._clock()
        if self._recent >= self._options.slow_factor * self._usual:
            self._slow = True
        elif self._recent <= self._options.recovered_factor * self._usual:
            self._slow = False
        weight = _PRESSED_WEIGHT if self._slow else _USUAL_WEIGHT
        self._usual += weight * (per_byte - self._usual)

    @property
    def is_spent(self) -> bool:
        """The endurance budget is used up for now, but for a last share that running requests may need."""
        return self._budget(self._clock()) < _LAST_SHARE * (self._options.bytes_per_day or 0)

    def try_spend(self, num_bytes: int, urgency: Urgency) -> bool:
        """Take ``num_bytes`` from the endurance budget; False if it does not hold them and nobody needs the store."""
        now = self._clock()
        left = self._budget(now)
        if num_bytes > left and urgency is Urgency.SPECULATIVE:
            return False
        if self._options.bytes_per_day is not None:
            self._budget_left, self._refilled_at = left - num_bytes, now
        return True

    def _budget(self, now: float) -> float:
        rate = self._options.bytes_per_day
        if rate is None:
            return math.inf
        return min(float(rate), self._budget_left + (now - self._refilled_at) * rate / _DAY_S)

    def stop(self) -> None:
        """End every wait, now and later."""
        self._stopping.set()
