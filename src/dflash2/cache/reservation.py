"""The reservation ledger: blocks promised to requests before they run (R-4.1)."""

from __future__ import annotations

from dflash2.errors import IntegrityError, RequestTooLarge
from dflash2.table.page_table import PageTable
from dflash2.types import Tier


def reservable_blocks(table: PageTable, batch_blocks: int) -> int:
    """What may be promised: all slots, less room to exchange a batch when every tier is full."""
    total = sum(table.capacity(tier) for tier in Tier)
    hbm = table.capacity(Tier.HBM)
    if total == hbm:
        return total
    return total - max(1, min(batch_blocks, hbm // 4, (total - hbm) // 4))


class ReservationLedger:
    """All promises together never exceed what all tiers hold; each is given all or nothing and released once.

    A running request's blocks may be promised on any tier: what a step reads is brought to HBM before it. So a promise
    has two bounds: all of them together fit all tiers, and each alone fits HBM.

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
    def num_free(self) -> int:
        """Blocks that may still be promised; 0 while the tiers hold less than was promised before they shrank."""
        return max(0, self.num_blocks - self._total)

    @property
    def num_requests(self) -> int:
        return len(self._promised)

    def check_size(self, count: int, at_once: int | None = None) -> None:
        """Check what a request needs against what there is.

        Args:
            count: blocks of all its branches.
            at_once: how many of them have to be in HBM at one time, those of its longest branch; by default all.

        Raises:
            RequestTooLarge: they never fit, however long the request waits.
        """
        if at_once is not None and count > self.num_blocks:
            raise RequestTooLarge(
                f"the request needs {count} KV blocks for all its branches and this server has room for "
                f"{self.num_blocks}; lower n, the beam width or max_tokens, or give the tiers more room"
            )
        count = count if at_once is None else at_once
        if count > self.largest:
            raise RequestTooLarge(
                f"the request needs {count} KV blocks at once and this server has room for {self.largest}; "
                "shorten the prompt, lower max_tokens, or give HBM more room (memory.hbm_reserve_mb, "
                "memory.hbm_capacity_mb)"
            )

    def try_reserve(self, request_id: str, count: int, at_once: int | None = None) -> bool:
        """Promise ``count`` blocks to the request, for all its branches or not at all. Arguments as for ``check_size``.

        Returns:
            False, and no change, if they are not to be had now.

        Raises:
            RequestTooLarge: see ``check_size``.
            IntegrityError: the request has a promise already.
        """
        self.check_size(count, at_once)
        if request_id in self._promised:
            raise IntegrityError(f"request {request_id} has a reservation already")
        if count > self.num_free:
            return False
        self._promised[request_id] = count
        self._total += count
        return True

    def try_extend(self, request_id: str, count: int, at_once: int | None = None) -> bool:
        """Raise the request's promise to ``count`` blocks; no effect if it is that large already.

        Arguments as for ``check_size``.

        Returns:
            False, and no change, if the difference is not to be had now.

        Raises:
            RequestTooLarge: see ``check_size``.
            IntegrityError: the request has no promise.
        """
        self.check_size(count, at_once)
        more = count - self.promised_to(request_id)
        if more > self.num_free:
            return False
        if more > 0:
            self._promised[request_id] += more
            self._total += more
        return True

    def give_back(self, request_id: str, count: int) -> int:
        """Lower the request's promise to ``count`` blocks; no effect if it is that small already.

        Returns:
            Blocks given back.

        Raises:
            IntegrityError: the request has no promise.
        """
        freed = max(0, self.promised_to(request_id) - count)
        self._promised[request_id] -= freed
        self._total -= freed
        return freed

    def holds(self, request_id: str) -> bool:
        """The request has a promise."""
        return request_id in self._promised

    def promised_to(self, request_id: str) -> int:
        """Blocks promised to the request.

        Raises:
            IntegrityError: it has no promise.
        """
        count = self._promised.get(request_id)
        if count is None:
            raise IntegrityError(f"request {request_id} has no reservation")
        return count

    def release(self, request_id: str) -> None:
        """Give the whole promise back.

        Raises:
            IntegrityError: the request has none; every promise is released exactly once.
        """
        self._total -= self.promised_to(request_id)
        del self._promised[request_id]

    def shrink(self, num_blocks: int) -> None:
        """The tiers hold less than before (retired slots); promises given stay."""
        self.num_blocks = num_blocks

    def check_integrity(self) -> None:
        """Raise IntegrityError if the total is not the sum of the promises."""
        if self._total != sum(self._promised.values()):
            raise IntegrityError("promised blocks do not add up")
        if any(count < 0 for count in self._promised.values()):
            raise IntegrityError("a promise is negative")
