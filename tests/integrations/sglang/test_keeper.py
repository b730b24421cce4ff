"""The keeper against real pools: what it says can be had is what was computed, whatever the engine gives up."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dflash2.build import create_runtime
from dflash2.cache.mover import Mover
from dflash2.config import parse_config
from dflash2.integrations.sglang.clock import TurnoverClock
from dflash2.integrations.sglang.copy_down import CLEAN_SHARE
from dflash2.integrations.sglang.keeper import Keeper
from dflash2.pools.tensor import LayerFirstPool
from dflash2.table.keys import KeyNamespace
from dflash2.table.page_table import TIER_BIT
from dflash2.transfer.cpu_copy import CpuCopier
from dflash2.types import IntArray, KVLayout, Tier, Urgency

LAYOUT = KVLayout(num_layers=2, num_kv_heads=1, head_dim=64, block_size=8, dtype="float32")
NUM_PAGES = 16
NAMESPACE = KeyNamespace("model", "1", "float32", 8)


class Engine:
    """Stands for SGLang: gives out the pages of its own pool and tells the keeper."""

    def __init__(self, path: Path, dram_blocks: int, nvme_blocks: int) -> None:
        shape = (NUM_PAGES * LAYOUT.block_size, 1, 64)
        self.k = [torch.zeros(shape) for _ in range(2)]
        self.v = [torch.zeros(shape) for _ in range(2)]
        pool = LayerFirstPool(self.k, self.v, LAYOUT, CpuCopier())
        self.clock = TurnoverClock(NUM_PAGES)
        mib = 1 << 20
        assert LAYOUT.stride_bytes * 128 == mib
        config = parse_config(
            f'{{"enable": true, "kv_block": {{"block_size": 8}}, "policy": {{"swap_batch_size": 4}}, "memory": '
            f'{{"dram_capacity_mb": {-(-dram_blocks // 128)}, "nvme_capacity_mb": {-(-nvme_blocks // 128)}, '
            f'"nvme_path": "{path}", "staging_buffer_size_mb": 1}}}}'
        )
        self.runtime = create_runtime(config, LAYOUT, NAMESPACE, engine_pool=pool, clock=self.clock)
        self.keeper = Keeper(self.runtime, self.clock, NUM_PAGES)
        self.cache = self.runtime.cache
        table = self.cache.table
        for tier, count in ((Tier.DRAM, dram_blocks), (Tier.NVME, nvme_blocks)):
            surplus = table.num_free(tier) - count
            if surplus > 0:
                table.tiers[tier].retire(table.tiers[tier].try_take(surplus))  # smaller than a MiB

    def compute(self, keys: list[int], pages: list[int], position: int = 0) -> IntArray:
        for key, page in zip(keys, pages, strict=True):
            self.write(page, key)
        parent = None if position == 0 else name(keys[0] - 1)
        return self.keeper.announce(None, [name(key) for key in keys], parent, position, np.array(pages, np.int32))

    def write(self, page: int, value: float) -> None:
        rows = slice(page * LAYOUT.block_size, (page + 1) * LAYOUT.block_size)
        for layer in range(2):
            self.k[layer][rows] = value + layer / 10
            self.v[layer][rows] = -value - layer / 10

    def give_up(self, pages: list[int]) -> None:
        self.keeper.freed(np.array(pages, np.int32))
        for page in pages:
            self.write(page, 999.0)

    def settle(self) -> None:
        for _ in range(200):
            self.keeper.step(0, None)
            if not self.cache.mover.num_in_flight:
                break
            self.runtime.wait(1.0)
        self.runtime.check_integrity()

    def load(self, keys: list[int], pages: list[int]) -> list[int] | None:
        ids = self.keeper.find_in_dram([name(key) for key in keys])
        if ids is None:
            return None
        watcher = Watcher()
        self.keeper.load(ids, np.array(pages, np.int32), watcher, None)
        while self.cache.mover.num_in_flight:
            self.runtime.wait(1.0)
        assert watcher.ok
        return watcher.layers

    def assert_page(self, page: int, value: float) -> None:
        rows = slice(page * LAYOUT.block_size, (page + 1) * LAYOUT.block_size)
        for layer in range(2):
            assert torch.equal(self.k[layer][rows], torch.full_like(self.k[layer][rows], value + layer / 10))
            assert torch.equal(self.v[layer][rows], torch.full_like(self.v[layer][rows], -value - layer / 10))


class Watcher:
    def __init__(self) -> None:
        self.layers: list[int] = []
        self.ok = False

    def arrived(self, layer: int) -> None:
        self.layers.append(layer)

    def ended(self, ok: bool) -> None:
        self.ok = ok


def name(key: int) -> bytes:
    return key.to_bytes(32, "little")


@pytest.fixture
def engine(tmp_path: Path) -> Engine:
    made = Engine(tmp_path, dram_blocks=12, nvme_blocks=128)
    yield made
    made.runtime.shutdown()


def test_a_block_survives_its_page(engine: Engine) -> None:
    engine.compute([10, 11, 12], [3, 7, 5])
    engine.settle()
    engine.give_up([3, 7, 5])
    found = engine.keeper.waiting.restorable("r", [name(key) for key in (10, 11, 12, 13)])
    assert (len(found.ids), found.num_ready) == (3, 3)
    assert engine.load([10, 11, 12], [9, 1, 2]) == [0, 1]
    for key, page in ((10, 9), (11, 1), (12, 2)):
        engine.assert_page(page, key)


def test_a_block_that_many_requests_wait_for_is_held_once_and_until_the_last(engine: Engine) -> None:
    (block_id,) = engine.compute([10], [3]).tolist()
    engine.settle()
    engine.give_up([3])
    found = [engine.keeper.find_in_dram([name(10)]) for _ in range(300)]
    busy = engine.cache.table.busy
    assert busy[block_id] == 1
    for ids in found[2:]:
        engine.keeper.let_go(ids)
    assert busy[block_id] == 1
    engine.keeper.load(np.concatenate(found[:2]), np.array([1, 2], np.int32), Watcher(), None)
    engine.settle()
    assert busy[block_id] == 0
    for page in (1, 2):
        engine.assert_page(page, 10)


def test_a_page_given_up_before_it_was_copied_is_never_offered(engine: Engine) -> None:
    ids = engine.compute([10, 11], [3, 4])
    engine.keeper._copy_down.begin(ids, None)  # begun, not ended
    engine.cache.mover.poll = lambda now: None  # type: ignore[method-assign]
    engine.give_up([3, 4])
    del engine.cache.mover.poll
    engine.settle()
    assert len(engine.keeper.waiting.restorable("r", [name(10)]).ids) == 0
    assert engine.cache.index.get(name(10)) is None
    assert engine.cache.table.num_used(Tier.DRAM) == 0


def test_what_dram_cannot_hold_goes_to_nvme_and_comes_back_through_dram(engine: Engine) -> None:
    for turn in range(6):
        keys = [100 * turn + i for i in range(4)]
        engine.compute(keys, [1, 2, 3, 4])
        engine.settle()
        engine.give_up([1, 2, 3, 4])
    engine.settle()
    keys = [name(i) for i in range(4)]
    found = engine.keeper.waiting.restorable("r", keys)
    assert len(found.ids) == 4
    assert found.num_ready < 4
    for _ in range(50):
        if engine.keeper.waiting.restorable("r", keys).num_ready == 4:
            break
        engine.keeper.waiting.bring_up("r")
        engine.runtime.wait(1.0)
    assert engine.load([0, 1, 2, 3], [5, 6, 7, 8]) == [0, 1]
    for key in range(4):
        engine.assert_page(5 + key, key)
    counters = engine.cache.counters
    assert counters.loaded_from_nvme_blocks > 0
    engine.keeper.used("r", keys, 40)
    hits = [counters.hit_tokens[tier] // LAYOUT.block_size for tier in Tier]
    assert hits == [0, found.num_ready, 4 - found.num_ready]  # by where they were when the request arrived


def test_what_is_not_worth_a_copy_gets_none_unless_a_retraction_asks(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine.cache.policy, "worth_storing", lambda table, ids, tier, now: np.zeros(len(ids), bool))
    ids = engine.compute([1, 2, 3], [0, 1, 2])
    engine.settle()
    assert engine.cache.counters.swap_out_blocks == 0
    engine.keeper.copy_down_now(ids, None, 10.0)
    engine.settle()
    assert (engine.cache.counters.swap_out_blocks, engine.cache.counters.demoted_to_nvme_blocks) == (3, 0)


def test_nothing_goes_to_nvme_while_dram_has_room(engine: Engine) -> None:
    engine.compute(list(range(8)), list(range(1, 9)))
    engine.settle()
    assert (engine.cache.counters.swap_out_blocks, engine.cache.counters.demoted_to_nvme_blocks) == (8, 0)


def test_a_part_of_a_full_dram_can_be_given_up_at_once(engine: Engine) -> None:
    engine.compute(list(range(11)), list(range(1, 12)))
    for _ in range(20):
        engine.settle()
    table = engine.cache.table
    there = table.on_tier(Tier.DRAM)
    num_clean = table.num_free(Tier.DRAM) + int(np.count_nonzero(table.has(there, Tier.NVME)))
    assert num_clean == int(CLEAN_SHARE * table.capacity(Tier.DRAM)) == 3
    assert engine.cache.counters.demoted_to_nvme_blocks == 2


def test_new_blocks_wait_for_room_in_dram_instead_of_passing_older_ones(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    mover, begun = engine.cache.mover, []

    def copy(ids: IntArray, src: Tier, dst: Tier, urgency: Urgency, **more: Any) -> IntArray:
        begun.append((src, dst))
        return Mover.copy(mover, ids, src, dst, urgency, **more)

    monkeypatch.setattr(mover, "copy", copy)
    for keys in (range(10), range(100, 110)):
        new = engine.compute(list(keys), list(range(1, 11)))
        for _ in range(500):
            engine.settle()
            if np.all(engine.cache.table.present[new] != TIER_BIT[Tier.HBM]):
                break
        engine.give_up(list(range(1, 11)))
    assert set(begun) == {(Tier.HBM, Tier.DRAM), (Tier.DRAM, Tier.NVME)}
    assert np.all(engine.cache.table.present[new] != 0)


def test_what_the_write_filter_forgets_stays_on_the_device_and_is_not_copied_again_before_it_is_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Engine(tmp_path, dram_blocks=6, nvme_blocks=128)
    policy, counters = engine.cache.policy, engine.cache.counters
    monkeypatch.setattr(policy, "on_leave", lambda table, ids, tier, now: np.ones(len(ids), bool))
    ids = engine.compute(list(range(10)), list(range(1, 11)))
    for _ in range(20):
        engine.settle()
    assert counters.demoted_to_nvme_blocks == 0
    assert 6 < counters.swap_out_blocks <= 10
    assert [engine.cache.index.get(name(key)) for key in range(10)] == ids.tolist()
    monkeypatch.undo()
    engine.clock.advance(1)
    engine.keeper.used("r", [name(key) for key in range(10)], 80)
    engine.compute([20], [11])
    for _ in range(20):
        engine.settle()
    assert counters.swap_out_blocks > 11
    engine.runtime.check_integrity()
    engine.runtime.shutdown()


def test_a_block_announced_again_elsewhere_has_one_row_and_one_page(engine: Engine) -> None:
    first = engine.compute([10], [3])
    assert engine.compute([10], [4]).tolist() == first.tolist()
    engine.give_up([3])
    engine.settle()
    engine.give_up([4])
    assert len(engine.keeper.waiting.restorable("r", [name(10)]).ids) == 1


def test_what_is_computed_a_second_time_is_counted(tmp_path: Path) -> None:
    engine = Engine(tmp_path, dram_blocks=0, nvme_blocks=0)
    for _ in range(2):
        engine.compute([10, 11], [3, 4])
        engine.give_up([3, 4])
    counters = engine.cache.counters
    assert (counters.computed_tokens, counters.recomputed_tokens) == (32, 16)
    engine.runtime.shutdown()


def test_a_restart_finds_what_was_on_disk(tmp_path: Path) -> None:
    before = Engine(tmp_path, dram_blocks=12, nvme_blocks=128)
    before.compute([10, 11], [3, 4])
    before.settle()
    before.runtime.shutdown()
    after = Engine(tmp_path, dram_blocks=12, nvme_blocks=128)
    keys = [name(10), name(11)]
    assert len(after.keeper.waiting.restorable("r", keys).ids) == 2
    after.keeper.waiting.bring_up("r")
    after.settle()
    assert after.load([10, 11], [1, 2]) == [0, 1]
    after.assert_page(1, 10)
    after.assert_page(2, 11)
    after.keeper.flush(5.0)
    after.runtime.shutdown()
    flushed = Engine(tmp_path, dram_blocks=12, nvme_blocks=128)
    assert len(flushed.keeper.waiting.restorable("r", keys).ids) == 0
    flushed.runtime.shutdown()


def test_a_flush_waits_for_copies_until_its_deadline_however_often_it_wakes(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine.keeper._copy_down.begin(engine.compute([10, 11], [3, 4]), None)
    num_waits = 0

    def wake_at_once(timeout_s: float) -> None:
        nonlocal num_waits
        num_waits += 1
        if num_waits > 1000:
            monkeypatch.undo()
            engine.runtime.wait(timeout_s)

    monkeypatch.setattr(engine.runtime, "wait", wake_at_once)
    engine.keeper.flush(20.0)
    assert num_waits > 1000
    assert not engine.cache.mover.num_in_flight


def test_what_was_on_its_way_to_the_disk_when_all_was_flushed_is_not_found_later(tmp_path: Path) -> None:
    engine = Engine(tmp_path, dram_blocks=12, nvme_blocks=128)
    engine.compute([10, 11], [3, 4])
    while not engine.cache.counters.swap_out_blocks:
        engine.keeper.step(0, None)
    engine.keeper.flush(0.0)  # the copies to NVMe have begun
    engine.settle()
    engine.runtime.shutdown()
    later = Engine(tmp_path, dram_blocks=12, nvme_blocks=128)
    assert len(later.keeper.waiting.restorable("r", [name(10)]).ids) == 0
    later.runtime.shutdown()


def test_copies_of_blocks_that_the_engine_still_has_are_not_made_over_and_over(tmp_path: Path) -> None:
    """DRAM smaller than the device pool: what does not earn a place there stays without a copy."""
    engine = Engine(tmp_path, dram_blocks=6, nvme_blocks=0)
    engine.compute(list(range(10, 20)), list(range(1, 11)))
    engine.settle()
    copied = engine.cache.counters.swap_out_blocks
    for _ in range(20):
        engine.settle()
    assert engine.cache.counters.swap_out_blocks == copied
    assert copied <= 8
    engine.runtime.shutdown()


def test_blocks_do_not_push_each_other_out_of_dram_while_nvme_is_spared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Engine(tmp_path, dram_blocks=4, nvme_blocks=32)
    monkeypatch.setattr(type(engine.cache.mover), "spares_nvme", property(lambda _: True))
    engine.compute(list(range(10)), list(range(1, 11)))
    for _ in range(30):
        engine.keeper.step(0, None)
        engine.runtime.wait(1.0)
    assert engine.cache.counters.swap_out_blocks == 4
    engine.runtime.check_integrity()


def test_a_long_load_arrives_layer_by_layer_whatever_the_number_of_threads(engine: Engine) -> None:
    engine.compute(list(range(10, 19)), list(range(1, 10)))
    engine.settle()
    engine.give_up(list(range(1, 10)))
    assert engine.load(list(range(10, 19)), list(range(4, 13))) == [0, 1]
    for key, page in zip(range(10, 19), range(4, 13), strict=True):
        engine.assert_page(page, key)


def test_requests_bring_up_what_fits_dram_together_in_the_order_of_arrival(engine: Engine) -> None:
    for turn in range(4):
        engine.compute([100 * turn + i for i in range(4)], [1, 2, 3, 4])
        engine.settle()
        engine.give_up([1, 2, 3, 4])
    for _ in range(2):  # asked again, each keeps its place
        for turn in range(4):
            engine.keeper.waiting.restorable(f"r{turn}", [name(100 * turn + i) for i in range(4)])
    assert [engine.keeper.waiting.in_front(f"r{turn}") for turn in range(4)] == [True, True, False, False]
    engine.keeper.waiting.forget("r0")
    assert engine.keeper.waiting.in_front("r2")


def test_what_was_brought_up_does_not_make_room_for_the_rest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(tmp_path, dram_blocks=8, nvme_blocks=32)
    pages = [1, 2, 3, 4, 5, 6]
    engine.compute([0, 1, 2, 3, 4, 5], pages)
    engine.settle()
    engine.give_up(pages)
    # What comes next has no copy on NVMe, so only the first ones' copies in DRAM can be given up without loss.
    monkeypatch.setattr(
        engine.cache.policy, "worth_storing", lambda _, ids, tier, __: np.full(len(ids), tier < Tier.NVME)
    )
    engine.compute([100 + i for i in range(6)], pages)
    engine.settle()
    engine.give_up(pages)
    keys = [name(i) for i in range(6)]
    ids = engine.keeper.waiting.restorable("r", keys).ids
    assert len(ids) == 6
    num_away = int(np.count_nonzero(~engine.cache.table.has(ids, Tier.DRAM)))
    for _ in range(10):  # so often somebody looks before it starts
        engine.keeper.waiting.restorable("r", keys)
        engine.keeper.waiting.bring_up("r")
        while engine.cache.mover.num_in_flight:
            engine.runtime.wait(1.0)
            engine.keeper.step(0, None)
    assert engine.keeper.waiting.restorable("r", keys).num_ready == 6
    assert engine.cache.counters.loaded_from_nvme_blocks == num_away > 0
    engine.keeper.waiting.forget("r")
    assert not engine.cache.table.busy.any()
    engine.runtime.check_integrity()


def test_expected_blocks_are_hot_until_the_request_has_them(engine: Engine) -> None:
    ids = engine.compute([10], [3])
    engine.settle()
    engine.give_up([3])
    engine.clock.advance(10 * NUM_PAGES)
    policy, table = engine.cache.policy, engine.cache.table
    assert policy.is_cold(table, ids, engine.clock())[0]
    engine.keeper.waiting.restorable("r", [name(10)])
    assert not policy.is_cold(table, ids, engine.clock())[0]
    engine.keeper.waiting.forget("r")
    assert policy.is_cold(table, ids, engine.clock())[0]


def test_blocks_stay_hot_while_another_request_waits_for_them(engine: Engine) -> None:
    engine.compute([10, 11, 12], [3, 4, 5])
    engine.settle()
    engine.give_up([3, 4, 5])
    waiting, table = engine.keeper.waiting, engine.cache.table
    ids = waiting.restorable("one", [name(10), name(11)]).ids
    for _ in range(2):  # asked twice, it waits once
        waiting.restorable("other", [name(10), name(11), name(12)])
    waiting.restorable("one", [name(10)])
    assert np.isfinite(table.next_use[ids]).all()
    engine.keeper.used("one", [name(10)], 8)
    waiting.forget("one")
    waiting.forget("one")
    assert np.isfinite(table.next_use[ids]).all()
    waiting.forget("other")
    assert not np.isfinite(table.next_use).any()


def test_a_request_is_expected_for_as_long_as_it_is_in_the_queue(engine: Engine) -> None:
    engine.compute([10, 20], [3, 4])
    engine.settle()
    engine.give_up([3, 4])
    waiting = engine.keeper.waiting
    for request_id, key in (("stays", 10), ("gone", 20)):
        waiting.restorable(request_id, [name(key)])
        waiting.bring_up(request_id)
    for _ in range(3000):
        engine.keeper.step(NUM_PAGES, None)
    waiting.forget_others(["stays", "unknown"])
    assert (waiting.num_blocks("stays"), waiting.num_blocks("gone")) == (1, 0)
    assert np.count_nonzero(engine.cache.table.busy) == 1
    assert np.count_nonzero(np.isfinite(engine.cache.table.next_use)) == 1


@pytest.mark.parametrize("seed", range(5))
def test_random_walk(tmp_path: Path, seed: int) -> None:
    """Pages come and go at any moment; whatever is loaded has the bytes that were computed."""
    rng = random.Random(seed)
    engine = Engine(tmp_path, dram_blocks=12, nvme_blocks=24)
    held: dict[int, list[int]] = {}  # sequence -> pages
    free = list(range(1, NUM_PAGES))
    loads = 0
    for _ in range(300):
        sequence = rng.randrange(12)
        keys = [1000 * sequence + i for i in range(1, 5)]
        if sequence in held:
            pages = held.pop(sequence)
            engine.give_up(pages)
            free += pages
        elif len(free) >= 4:
            rng.shuffle(free)
            pages = [free.pop() for _ in range(4)]
            found = engine.keeper.waiting.restorable("r", [name(key) for key in keys])
            engine.keeper.waiting.bring_up("r")
            ready = keys[: found.num_ready]
            if ready and engine.load(ready, pages[: len(ready)]) is not None:
                loads += 1
                for key, page in zip(ready, pages, strict=False):
                    engine.assert_page(page, key)
            held[sequence] = pages
            engine.compute(keys, pages)
            engine.keeper.used("r", [name(key) for key in ready], 32)
            engine.keeper.waiting.forget("r")
        if rng.random() < 0.7:
            engine.keeper.step(0, None)
        if rng.random() < 0.1:
            engine.settle()
    engine.settle()
    assert loads  # how many depends on how fast the copies are
    assert engine.cache.counters.demoted_to_nvme_blocks > 0
    engine.runtime.shutdown()
