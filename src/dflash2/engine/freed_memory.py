"""Gives memory that was used for one large step back to the system once the engine has nothing to do.

A step of a thousand prompt tokens takes some 60 MB for its intermediate results, a prompt of a megabyte as much to be
tokenised. glibc keeps most of what is freed for later, in pieces between others that are in use.
"""

from __future__ import annotations

import ctypes

AFTER_WORK_S = 1.0
"""So long the engine must have been idle: the next request finds its memory in place."""
WHILE_IDLE_S = 60.0
"""And again so often, for what other threads freed."""


class FreedMemory:
    """Called by an engine after each step and while it is idle. Only glibc knows how; elsewhere nothing is done."""

    def __init__(self) -> None:
        self._trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        self._due_s = 0.0

    def after_step(self, now: float) -> None:
        """A step has ended; ``now`` in seconds of the engine's clock."""
        self._due_s = now + AFTER_WORK_S

    def while_idle(self, now: float) -> None:
        """Give back what is free, if it is time to. Takes some milliseconds."""
        if self._trim is not None and now >= self._due_s:
            self._due_s = now + WHILE_IDLE_S
            self._trim(0)
