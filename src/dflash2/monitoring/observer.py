"""What is done now and then for the people who watch: swap lines, history, advice, answers to the page."""

from __future__ import annotations

import time
from typing import Any, Protocol

from dflash2.config import Config
from dflash2.monitoring.advice import Advisor
from dflash2.monitoring.disk_watch import DiskWatch
from dflash2.monitoring.history import History
from dflash2.monitoring.mailbox import Mailbox
from dflash2.monitoring.swap_log import SwapLog


class Observed(Protocol):
    """What the views ask of a runtime. All from the thread that drives it."""

    config: Config
    """What is in effect."""

    def stats(self) -> dict[str, Any]:
        """Nested counters and gauges."""
        ...

    def blocks(self, count: int) -> dict[str, Any]:
        """The hottest and the coldest blocks, why, and how heat is spread."""
        ...

    def worst_blocks(self) -> list[tuple[int, int]]:
        """(block_id, misses) of the blocks that were most often not in HBM when needed."""
        ...

    def policy_limits(self) -> dict[str, tuple[float, float]]:
        """Smallest and largest value of each setting that has a range."""
        ...

    def set_policy(self, **changes: Any) -> dict[str, Any]:
        """Change settings while running. Raises ConfigError."""
        ...


class Observer:
    """Runs between steps, in the thread that drives the runtime.

    Args:
        swap_log: writes the lines that ``grep dflash2_swap`` finds.
        history: None where none is kept.
        advisor: warns.
        disk: under the NVMe tier; None where there is none. Read by the page, never here.
    """

    def __init__(
        self,
        swap_log: SwapLog,
        history: History | None,
        advisor: Advisor,
        disk: DiskWatch | None = None,
    ) -> None:
        self.mailbox: Mailbox[Observed] = Mailbox()
        """Questions of other threads."""
        self.history = history
        self.advisor = advisor
        self.disk = disk
        self._swap_log = swap_log

    def step(self, observed: Observed) -> None:
        """One round. Next to free unless a second has passed."""
        self.mailbox.answer(observed)
        self._swap_log.step(time.monotonic())  # for people, whatever the clock of decisions is
        if self.history is not None:
            self.history.step(observed.stats)
        self.advisor.step(observed.stats, observed.config, observed.worst_blocks)

    def close(self) -> None:
        """Keep the history. Idempotent."""
        if self.history is not None:
            self.history.close()
