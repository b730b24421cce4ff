"""What a policy from the literature offers to a replay."""

from __future__ import annotations

from typing import Protocol


class ClassicalCache(Protocol):
    """Decides block by block, without knowledge of requests. A new one is a file and a line in ``replay.caches``.

    Constructed with the number of blocks that it holds.
    """

    def __contains__(self, block: int) -> bool:
        """The block is held. Without any effect."""
        ...

    def touch(self, block: int) -> None:
        """The block is used; a block that is not held may be taken in, and others given up for it."""
        ...
