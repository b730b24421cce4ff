"""What every pool that holds bytes must do. Subclass it and give a ``pool`` fixture with ``NUM_SLOTS`` empty slots."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from tests.pools.blocks import (
    NUM_SLOTS,
    assert_blocks,
    keys_of,
    new_rows,
    payload,
    read_blocks,
    slots_of,
    write_blocks,
)

from dflash2.pools.base import BlockPool


class PoolSuite:
    def test_returns_what_was_stored_slot_by_slot(self, pool: BlockPool) -> None:
        keys = list(range(100, 100 + NUM_SLOTS))
        assert all(write_blocks(pool, range(NUM_SLOTS), keys))
        for slot, key in enumerate(keys):
            assert_blocks(pool, [slot], [key])

    @pytest.mark.parametrize(
        "slots",
        [[0], [NUM_SLOTS - 1], [3, 4, 5, 6], [7, 2, 11, 0], [6, 5, 4], [1, 2, 3, 9, 10, 14]],
        ids=["first", "last", "run", "scattered", "backwards", "runs"],
    )
    def test_any_set_of_slots(self, pool: BlockPool, slots: list[int]) -> None:
        write_blocks(pool, range(NUM_SLOTS), range(NUM_SLOTS))
        keys = [1000 + slot for slot in slots]
        assert all(write_blocks(pool, slots, keys))
        assert_blocks(pool, slots, keys)
        others = [slot for slot in range(NUM_SLOTS) if slot not in slots]
        assert_blocks(pool, others, others)

    def test_rows_may_lie_in_any_order(self, pool: BlockPool) -> None:
        buffer = new_rows(5)
        for row in range(5):
            buffer[row, : pool.layout.block_bytes] = payload(row)
        assert pool.scatter(slots_of([8, 1, 9]), buffer, slots_of([4, 0, 2]), keys_of([4, 0, 2])).all()
        assert_blocks(pool, [8, 1, 9], [4, 0, 2])
        out = new_rows(5)
        assert pool.gather(slots_of([1, 8]), out, slots_of([3, 1])).all()
        assert np.array_equal(out[3, : pool.layout.block_bytes], payload(0))
        assert np.array_equal(out[1, : pool.layout.block_bytes], payload(4))
        for untouched in (0, 2, 4):
            assert (out[untouched] == 0xEE).all()

    def test_no_blocks_is_not_an_error(self, pool: BlockPool) -> None:
        none = slots_of([])
        assert pool.gather(none, new_rows(1), none).shape == (0,)
        assert pool.scatter(none, new_rows(1), none, keys_of([])).shape == (0,)

    def test_overwriting_leaves_only_the_new_block(self, pool: BlockPool) -> None:
        write_blocks(pool, [4], [1])
        write_blocks(pool, [4], [2])
        assert_blocks(pool, [4], [2])

    def test_threads_on_different_slots_do_not_disturb_each_other(self, pool: BlockPool) -> None:
        def churn(first: int) -> None:
            for turn in range(10):
                keys = [turn * 100 + first, turn * 100 + first + 1]
                write_blocks(pool, [first, first + 1], keys)
                if not all(
                    found is not None and np.array_equal(found, payload(key))
                    for key, found in zip(keys, read_blocks(pool, [first, first + 1]), strict=True)
                ):
                    wrong.append(first)

        wrong: list[int] = []
        threads = [threading.Thread(target=churn, args=(first,)) for first in (0, 4, 8, 12)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert wrong == []

    def test_close_is_idempotent(self, pool: BlockPool) -> None:
        pool.close()
        pool.close()
