"""The reservation ledger: blocks promised to requests before they run (R-4.1)."""

from __future__ import annotations

from dflash2.errors import IntegrityError, RequestTooLarge


class ReservationLedger:
    """All promises together never exceed what all tiers hold; each is given all or nothing and released once.

    Args:
        num_blocks: blocks that all tiers together hold.
        largest: the most blocks one request may need: they must fit HBM at the same time.
    """

    def __init__(self, num_blocks: int, largest: int) -> None:
        self.num_blocks = num_blocks
        self.largest = min(largest, num_blocks)
        self._promised: dict[str, int] = {}
        self._total = 0

    @property
    def num_promised(self) -> int:
        return self._total

    @property
    def num_requests(self) -> int:
        return len(self._promised)

    def check_size(self, count: int) -> None:
        """Raises:
        RequestTooLarge: ``count`` blocks never fit, however long the request waits.
        """
        if count > self.largest:
            raise RequestTooLarge(
                f"the request needs {count} KV blocks at once and this server has room for {self.largest}; "
                "shorten the prompt, lower max_tokens, or give HBM more room (memory.hbm_reserve_mb, "
                "memory.hbm_capacity_mb)"
            )

    def try_reserve(self, request_id: str, count: int) -> bool:
        """Promise ``count`` blocks to the request.

        Returns:
            False, and no change, if they are not to be had now.

        Raises:
            RequestTooLarge: see ``check_size``.
        """
        self.check_size(count)
        if request_id in self._promised:
            raise IntegrityError(f"request {request_id} has a reservation already")
        if self._total + count > self.num_blocks:
            return False
        self._promised[request_id] = count
        self._total += count
        return True

    def holds(self, request_id: str) -> bool:
        """The request has a promise."""
        return request_id in self._promised

    def release(self, request_id: str) -> None:
        """Give the promise back. The request must have one."""
        self._total -= self._promised.pop(request_id)

    def shrink(self, num_blocks: int) -> None:
        """The tiers hold less than before (retired slots); promises given stay."""
        self.num_blocks = num_blocks

    def check_integrity(self) -> None:
        """Raise IntegrityError if the total is not the sum of the promises."""
        if self._total != sum(self._promised.values()):
            raise IntegrityError("promised blocks do not add up")
