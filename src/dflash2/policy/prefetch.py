"""How far to prefetch: a window that widens only while it pays (R-3.4)."""

from __future__ import annotations

MAX_WINDOW = 8
JUDGED_AFTER = 16
"""Outcomes between two verdicts."""
WIDEN_AT = 0.8
NARROW_AT = 0.5


class PrefetchWindow:
    """Number of blocks that may be in flight at a time.

    Args:
        configured: ``kv_block.prefetch_window``; widens up to ``MAX_WINDOW`` and narrows down to 1.
    """

    def __init__(self, configured: int) -> None:
        self.configured = configured
        self.size = configured
        self._used = 0
        self._wasted = 0

    def configure(self, configured: int) -> None:
        """Another window was configured while running: start from it, unless it is the same."""
        if configured != self.configured:
            self.configured = self.size = configured

    def note(self, *, used: int = 0, wasted: int = 0) -> None:
        """Outcomes of prefetched blocks: used in time, or given up unused."""
        self._used += used
        self._wasted += wasted

    def update(self, *, has_room: bool) -> int:
        """Adjust to the outcomes seen and return the window.

        Args:
            has_room: HBM has free slots that neither new blocks nor promises need: it is below its high watermark.
        """
        judged = self._used + self._wasted
        if judged >= JUDGED_AFTER:
            share_used = self._used / judged
            if share_used >= WIDEN_AT and has_room:
                self.size = min(MAX_WINDOW, self.size + 1)
            elif share_used < NARROW_AT:
                self.size = max(1, self.size // 2)
            self._used = self._wasted = 0
        if not has_room:
            self.size = min(self.size, self.configured)
        return self.size
