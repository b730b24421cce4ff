"""The runtime as an engine of one's own uses it."""

from __future__ import annotations

import json
import logging
import re
import time

import numpy as np
import pytest
from tests.fakes.clock import ManualClock
from tests.fakes.engine_world import BLOCK, make_runtime, scripted
from tests.fakes.transfer import ScriptedTransfer

from dflash2.cache.sequence import Residency, Sequence
from dflash2.errors import CapacityError, ConfigError, DeadlineExceeded, RequestTooLarge
from dflash2.runtime import Runtime
from dflash2.types import IntArray, Tier


def tokens(number: int, count: int) -> IntArray:
    return np.full(count, number, np.int32)


class Own:
    """The smallest engine: each token's word is its value; prompts are computed whole."""

    def __init__(self, slots: tuple[int, int, int]) -> None:
        self.clock = ManualClock()
        self.transfer: ScriptedTransfer = scripted(slots)
        self.words = self.transfer.memory[Tier.HBM]
        self.runtime: Runtime = make_runtime(slots, self.transfer, self.clock, self.words.view(np.uint64))

    def step(self, *work: tuple[Sequence, IntArray]) -> None:
        tables = self.runtime.prepare_step([(sequence, len(new)) for sequence, new in work])
        for (sequence, new), table in zip(work, tables, strict=True):
            self.check(sequence, table)
            for index, token in enumerate(new.tolist(), sequence.num_tokens):
                self.words[table[index // BLOCK], index % BLOCK] = token
        self.runtime.complete_step(list(work))
        self.clock.advance(0.01)
        self.runtime.check_integrity()

    def check(self, sequence: Sequence, table: IntArray) -> None:
        there = self.words[table].reshape(-1)[: sequence.num_tokens]
        assert there.tolist() == sequence.tokens.tolist(), "wrong KV"

    def open(self, name: str, number: int, count: int, more: int = 0) -> Sequence:
        sequence = self.runtime.open(name, tokens(number, count), more)
        assert sequence is not None
        return sequence


@pytest.fixture
def own() -> Own:
    return Own((6, 8, 12))


def test_prepare_waits_for_loads_and_the_step_reads_the_right_kv(own: Own) -> None:
    one, two = own.open("one", 1, 20, 4), own.open("two", 2, 20, 4)
    own.step((one, tokens(1, 20)))
    for _ in range(4):
        own.runtime.pause(one)
        own.step((two, tokens(2, 20 if two.num_tokens == 0 else 1)))
        own.runtime.pause(two)
        own.step((one, tokens(1, 1)))
    assert own.runtime.stats()["counters"]["swap_in_blocks"] > 0
    own.runtime.close(one)
    own.runtime.close(two)
    assert own.runtime.ledger.num_promised == 0


def test_a_step_that_does_not_fit_says_who_and_nothing_is_lost(own: Own) -> None:
    one, two = own.open("one", 1, 16), own.open("two", 2, 16)
    own.step((one, tokens(1, 16)))
    with pytest.raises(CapacityError, match="two"):
        own.runtime.prepare_step([(one, 0), (two, 16)])
    own.runtime.check_integrity()
    own.runtime.pause(one)
    own.step((two, tokens(2, 16)))


def test_a_failed_step_can_be_prepared_again(own: Own) -> None:
    one = own.open("one", 1, 10, 2)
    tables = own.runtime.prepare_step([(one, 10)])
    own.words[tables[0]] = -1
    assert one.num_tokens == 0
    own.step((one, tokens(1, 10)))
    own.step((one, tokens(1, 1)))


def test_loads_that_take_too_long_end_the_wait(own: Own) -> None:
    one = paused_below(own)
    own.transfer.deaf = True
    num_waits = 0

    def wait(tickets: list[int], timeout_s: float) -> bool:
        nonlocal num_waits
        assert 0 < timeout_s <= 0.01
        num_waits += 1
        assert num_waits < 1_000, "it waits for a clock that stands still"
        time.sleep(timeout_s)
        return False

    own.transfer.wait = wait  # type: ignore[method-assign]
    before = own.clock()
    with pytest.raises(DeadlineExceeded, match=r"one was not in HBM after 0\.01"):
        own.runtime.prepare_step([(one, 1)], timeout_s=0.01)
    assert num_waits and own.clock() == before
    # The way out is to compute again what has not arrived.
    left = own.runtime.recover(one, give_up_loads=True)
    assert left == 0 and one.residency is Residency.PAUSED
    own.transfer.end_all()
    del own.transfer.wait  # type: ignore[method-assign]
    own.transfer.deaf = False
    own.step((one, tokens(1, 9)))


def paused_below(own: Own) -> Sequence:
    """A sequence of two full blocks, both in DRAM only."""
    one = own.open("one", 1, 8, 4)
    own.step((one, tokens(1, 8)))
    own.runtime.pause(one)
    own.runtime.cache.room.demote(one.block_ids, Tier.HBM, own.clock())
    own.transfer.end_all()
    own.runtime.poll()
    assert not own.runtime.cache.table.has(one.block_ids, Tier.HBM).any()
    return one


def test_recover_cuts_at_the_first_block_that_is_lost(own: Own) -> None:
    one = paused_below(own)
    assert own.runtime.try_enter(one, 1)
    own.transfer.end(own.transfer.in_flight[0], ok=[True, False], bad_source=[False, True])
    own.runtime.poll()
    assert own.runtime.recover(one) == 4
    assert own.runtime.recover(one) is None
    own.step((one, tokens(1, 5)))


def test_nothing_missing_means_nothing_to_recover(own: Own) -> None:
    one = own.open("one", 1, 8)
    own.step((one, tokens(1, 8)))
    assert own.runtime.recover(one) is None and own.runtime.recover(one, give_up_loads=True) is None
    assert one.residency is Residency.RESIDENT


def test_open_reserves_all_or_nothing(own: Own) -> None:
    own.open("one", 1, 4, 20)
    own.open("two", 2, 4, 20)
    own.open("three", 3, 4, 20)
    assert own.runtime.ledger.num_promised == 18
    own.open("four", 4, 4, 20)
    assert own.runtime.open("five", tokens(5, 4), 8) is None
    stats = own.runtime.stats()["counters"]
    assert (stats["reservations"], stats["reservations_refused"]) == (4, 1)
    assert not own.runtime.ledger.holds("five")
    with pytest.raises(RequestTooLarge):
        own.runtime.open("six", tokens(6, 25), 0)


def test_branches_that_never_fit_together_are_refused_for_good(own: Own) -> None:
    with pytest.raises(RequestTooLarge, match="for all its branches"):
        own.runtime.open("one", tokens(1, 4), 16, num_branches=8)
    assert own.runtime.ledger.num_promised == 0


def test_has_room_for_counts_what_is_pinned_and_what_is_cached(own: Own) -> None:
    one = own.open("one", 1, 16, 4)
    own.step((one, tokens(1, 16)))
    before = own.runtime.stats()["counters"]
    assert own.runtime.prompts.has_room_for(tokens(2, 8)) and not own.runtime.prompts.has_room_for(tokens(2, 9))
    # Three of these blocks are pinned already.
    assert own.runtime.prompts.has_room_for(np.concatenate([tokens(1, 12), tokens(2, 8)]))
    assert not own.runtime.prompts.has_room_for(np.concatenate([tokens(1, 12), tokens(2, 8)]), tenant_salt="other")
    assert own.runtime.stats()["counters"] == before


def test_adapters_and_tenants_do_not_share(own: Own) -> None:
    one = own.open("one", 1, 8)
    own.step((one, tokens(1, 8)))
    assert own.runtime.open_unreserved("a", tokens(1, 8)).num_tokens == 4
    assert own.runtime.open_unreserved("b", tokens(1, 8), adapter="x").num_tokens == 0
    assert own.runtime.open_unreserved("c", tokens(1, 8), tenant_salt="x").num_tokens == 0


def test_close_is_idempotent_and_gives_the_promise_back_once(own: Own) -> None:
    one = own.open("one", 1, 8)
    own.runtime.close(one)
    own.runtime.close(one)
    assert own.runtime.ledger.num_promised == 0
    own.runtime.close(own.runtime.open_unreserved("two", tokens(1, 8)))


def test_flush_forgets_on_all_tiers_and_leaves_open_sequences_alone(own: Own) -> None:
    one = paused_below(own)
    own.runtime.flush()
    assert own.open("two", 1, 12).num_cached_tokens == 0
    own.step((one, tokens(1, 1)))


def test_nothing_computed_with_other_weights_is_found(own: Own) -> None:
    paused_below(own)
    old = own.open("old", 7, 8)
    own.step((old, tokens(7, 8)))
    own.runtime.replace_weights("v2")
    assert own.open("two", 1, 12).num_cached_tokens == 0
    own.runtime.close(old)  # ends what it had begun; that is not found either
    assert own.open("three", 7, 12).num_cached_tokens == 0
    own.runtime.check_integrity()


def test_prefetch_brings_upcoming_blocks_before_they_are_needed(own: Own) -> None:
    one = paused_below(own)
    own.runtime.rebalance([], [one])
    own.transfer.end_all()
    own.runtime.rebalance([], [one])
    own.step((one, tokens(1, 1)))
    counters = own.runtime.stats()["counters"]
    assert counters["prefetch_used_blocks"] == 2 and own.runtime.stats()["hbm_hit_rate"] == 1.0


def test_each_step_uses_the_blocks_that_it_reads(own: Own) -> None:
    one = own.open("one", 1, 8, 4)
    own.step((one, tokens(1, 8)))
    before = own.runtime.stats()["counters"]["used_blocks"]
    own.step((one, tokens(1, 1)))
    counters = own.runtime.stats()["counters"]
    assert (counters["used_blocks"] - before, counters["used_in_hbm_blocks"]) == (2, counters["used_blocks"])


def test_a_fork_shares_and_then_goes_its_own_way(own: Own) -> None:
    one = own.open("one", 1, 6, 6)
    own.step((one, tokens(1, 6)))
    two = own.runtime.cache.fork(one, "two")
    own.step((one, tokens(7, 1)), (two, tokens(8, 1)))
    own.step((one, tokens(7, 1)), (two, tokens(8, 1)))
    assert one.block_ids[0] == two.block_ids[0] and one.block_ids[1] != two.block_ids[1]
    own.runtime.close(two)
    own.step((one, tokens(7, 1)))


def test_without_tiers_below_nothing_is_demoted_or_prefetched() -> None:
    own = Own((6, 0, 0))
    assert not own.runtime.can_swap
    one = own.open("one", 1, 20, 4)
    own.step((one, tokens(1, 20)))
    own.runtime.pause(one)
    own.runtime.rebalance([], [one])
    assert not own.transfer.submitted


def test_statistics_are_json_and_add_up(own: Own) -> None:
    one = own.open("one", 1, 8, 4)
    own.step((one, tokens(1, 8)))
    stats = own.runtime.stats()
    json.dumps(stats)
    assert stats["tiers"]["hbm"] == {
        "capacity_blocks": 6,
        "used_blocks": 2,
        "retired_blocks": 0,
        "pool_bytes": 6 * stats["block_bytes"],
    }
    assert (stats["pinned_blocks"], stats["reserved_blocks"], stats["copies_in_flight"]) == (2, 3, 0)
    assert stats["counters"]["computed_tokens"] == 8


def test_the_startup_line_counts_hbm_dram_and_nvme(own: Own) -> None:
    line = own.runtime.startup_line()
    assert line == "DFlash2: enabled, total virtual cache size 0.0GB, committed 0.0GB"


def test_shutdown_is_idempotent_and_cancels_what_is_in_flight(own: Own) -> None:
    one = paused_below(own)
    own.runtime.try_enter(one, 0)
    own.runtime.shutdown()
    own.runtime.shutdown()
    assert not own.transfer.in_flight


def test_settings_change_while_running_and_are_in_effect_in_the_next_round(
    own: Own, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "dflash2.runtime"):
        now = own.runtime.set_policy(cold_threshold=0.3, swap_batch_size=2, prefetch_window=8, refresh_interval_s=100.0)
    assert now["cold_threshold"] == 0.3 and now["high_watermark"] == 0.9
    assert "cold_threshold changed from 0.8 to 0.3" in caplog.messages and len(caplog.messages) == 4
    own.runtime.rebalance([], [])
    stats = own.runtime.stats()
    assert (stats["cold_threshold"], stats["effective_threshold"], stats["prefetch_window"]) == (0.3, 0.3, 8)
    assert own.runtime.cache.mover.batch_blocks == 2
    own.runtime.set_policy(adaptive=False, cold_threshold=0.5)
    own.clock.advance(1.0)  # the interval has not passed, the change counts all the same
    own.runtime.rebalance([], [])
    assert own.runtime.stats()["effective_threshold"] == 0.5


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"cold_threshold": 1.5}, "policy.cold_threshold: 1.5 is out of range"),
        ({"low_watermark": 0.95}, "policy.low_watermark: 0.95 must be below"),
        ({"cold_threshold": 0.5, "prefetch_window": "4"}, "kv_block.prefetch_window"),
        ({"block_size": 64}, "block_size: cannot be changed while running"),
        ({"swap_batch_size": 5}, "policy.swap_batch_size: at most 4"),
    ],
)
def test_a_wrong_setting_is_refused_and_changes_nothing(own: Own, changes: dict[str, object], message: str) -> None:
    before = own.runtime.set_policy()
    with pytest.raises(ConfigError, match=re.escape(message)):
        own.runtime.set_policy(**changes)
    assert own.runtime.set_policy() == before
