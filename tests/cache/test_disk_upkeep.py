"""Cache and disk together: what a flush leaves behind, slots that go bad, a device that is to be spared (T6, T14)."""

from __future__ import annotations

import logging
import threading
from pathlib import Path

import numpy as np
import pytest

from dflash2 import Config, KeyNamespace, KVLayout, Runtime, create_runtime
from dflash2.cache.sequence import Sequence
from dflash2.pools.nvme import NvmePool
from dflash2.types import BoolArray, ByteArray, IntArray, Tier, Urgency

BLOCK = 16
LAYOUT = KVLayout(num_layers=2, num_kv_heads=2, head_dim=32, block_size=BLOCK, dtype="float32")  # 16 KiB a block
SPACE = KeyNamespace("m", "w1", "float32", BLOCK)
PROMPT = np.arange(6 * BLOCK + 1, dtype=np.int32)


def start(path: Path) -> Runtime:
    sizes = {"hbm_capacity_mb": 1, "dram_capacity_mb": 1, "nvme_capacity_mb": 2, "nvme_path": str(path)}
    memory = {**sizes, "staging_buffer_size_mb": 1}
    config = Config.model_validate({"enable": True, "memory": memory, "kv_block": {"block_size": BLOCK}})
    return create_runtime(config, LAYOUT, SPACE)


def nvme_of(runtime: Runtime) -> NvmePool:
    pool = runtime.pools[Tier.NVME]
    assert isinstance(pool, NvmePool)
    return pool


def serve(runtime: Runtime, name: str, prompt: IntArray) -> Sequence:
    """Compute a prompt: block ``i`` is filled with ``i``."""
    sequence = runtime.open(name, prompt, 4)
    assert sequence is not None
    step(runtime, sequence, prompt[sequence.num_tokens :])
    return sequence


def step(runtime: Runtime, sequence: Sequence, new: IntArray) -> None:
    (slots,) = runtime.prepare_step([(sequence, len(new))])
    for index in range(sequence.num_tokens // BLOCK):
        assert (runtime.hbm_tensor[int(slots[index])] == index).all(), "wrong KV"
    for index in range(sequence.num_tokens // BLOCK, len(slots)):
        runtime.hbm_tensor[int(slots[index])] = index
    runtime.complete_step([(sequence, new)])
    runtime.check_integrity()


def push_down(runtime: Runtime, ids: IntArray, tier: Tier = Tier.NVME) -> None:
    runtime.cache.mover.copy(ids, Tier.HBM, tier, Urgency.DEMOTION, evict_source=True)
    settle(runtime)


def settle(runtime: Runtime) -> None:
    while runtime.cache.mover.num_in_flight:
        runtime.wait(1.0)


def cached(runtime: Runtime) -> int:
    """Blocks of the prompt that a lookup finds."""
    return len(runtime.cache.peek(SPACE.root(), PROMPT))


def test_an_open_requests_blocks_are_not_found_by_a_later_run_after_a_flush(tmp_path: Path) -> None:
    runtime = start(tmp_path)
    held = serve(runtime, "held", PROMPT)
    runtime.pause(held)
    push_down(runtime, held.block_ids)
    runtime.flush()
    assert cached(runtime) == 0
    step(runtime, held, np.array([1], np.int32))  # it has lost nothing
    runtime.check_integrity()
    runtime.shutdown()  # as a crash would: the request was never closed
    later = start(tmp_path)
    assert len(nvme_of(later).recover().slots) == 0 and cached(later) == 0
    later.shutdown()


def test_what_is_on_its_way_to_the_disk_at_a_flush_is_not_found_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runtime = start(tmp_path)
    runtime.close(serve(runtime, "r", PROMPT))
    ids = runtime.cache.peek(SPACE.root(), PROMPT)
    pool, begun, gate = nvme_of(runtime), threading.Event(), threading.Event()
    store = pool._io.store

    def held(slots: IntArray, buffer: ByteArray, rows: IntArray, keys: ByteArray) -> BoolArray:
        begun.set()
        gate.wait()
        return store(slots, buffer, rows, keys)

    monkeypatch.setattr(pool._io, "store", held)
    runtime.cache.mover.copy(ids, Tier.HBM, Tier.NVME, Urgency.DEMOTION)
    assert begun.wait(60.0)  # with its key
    runtime.flush()
    gate.set()
    settle(runtime)
    runtime.poll()
    runtime.check_integrity()
    assert runtime.cache.table.num_used(Tier.NVME) == 0
    runtime.shutdown()
    later = start(tmp_path)
    assert len(nvme_of(later).recover().slots) == 0
    later.shutdown()


def test_the_end_keeps_what_is_cached_in_memory_for_the_next_start(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    runtime = start(tmp_path)
    runtime.close(serve(runtime, "r", PROMPT))
    ids = runtime.cache.peek(SPACE.root(), PROMPT)
    push_down(runtime, ids[2:4], Tier.DRAM)
    with caplog.at_level(logging.INFO):
        runtime.shutdown()
    assert "6 blocks (0.00 GB) copied to NVMe for the next start, 0 (0.00 GB) dropped" in caplog.text
    later = start(tmp_path)
    assert cached(later) == 6
    assert serve(later, "again", PROMPT).num_cached_tokens == 6 * BLOCK  # and is right
    later.shutdown()


def test_the_end_drops_what_has_no_room_or_no_time_heads_last(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    runtime = start(tmp_path)
    runtime.close(serve(runtime, "r", PROMPT))
    slots = runtime.cache.table.tiers[Tier.NVME]
    slots.withdraw(slots.free_slots()[:-4])
    with caplog.at_level(logging.INFO):
        runtime.shutdown()
    assert "4 blocks (0.00 GB) copied to NVMe for the next start, 2 (0.00 GB) dropped" in caplog.text
    later = start(tmp_path)
    assert cached(later) == 4, "a prefix without its head would be worthless"
    later.flush()
    later.close(serve(later, "r", PROMPT))
    with caplog.at_level(logging.INFO):
        later.shutdown(timeout_s=0.0)
    assert "0 blocks (0.00 GB) copied" in caplog.text


def test_a_slot_that_fails_is_promised_to_nobody_any_more(tmp_path: Path) -> None:
    runtime = start(tmp_path)
    promised = runtime.ledger.num_blocks
    held = serve(runtime, "held", PROMPT)
    runtime.pause(held)
    push_down(runtime, held.block_ids)
    table = runtime.cache.table
    bad = int(table.slots_of(held.block_ids[2:3], Tier.NVME)[0])
    with (nvme_of(runtime).folder / "data").open("r+b") as file:
        file.seek(4096 + bad * LAYOUT.stride_bytes)
        file.write(b"rot")
    assert runtime.try_enter(held, 1)
    settle(runtime)
    assert runtime.recover(held) == 2 * BLOCK
    assert table.tiers[Tier.NVME].num_retired == 1
    assert runtime.ledger.num_blocks == promised - 1
    assert runtime.stats()["tiers"]["nvme"]["capacity_blocks"] == nvme_of(runtime).num_slots - 1
    runtime.check_integrity()
    runtime.shutdown()


def test_a_slot_that_the_pool_gave_up_is_not_handed_out_again(tmp_path: Path) -> None:
    runtime = start(tmp_path)
    pool, slots = nvme_of(runtime), runtime.cache.table.tiers[Tier.NVME]
    doomed = slots.free_slots()[-2:]  # the next ones
    pool._headers.quarantine(doomed)
    runtime.poll()
    assert slots.num_retired == 2 and not np.isin(doomed, slots.free_slots()).any()
    held = serve(runtime, "r", PROMPT)
    runtime.pause(held)
    push_down(runtime, held.block_ids)
    assert runtime.cache.table.has(held.block_ids, Tier.NVME).all()
    runtime.check_integrity()
    runtime.shutdown()


def test_a_slot_that_could_not_be_written_is_the_last_to_be_tried_again(tmp_path: Path) -> None:
    runtime = start(tmp_path)
    slots = runtime.cache.table.tiers[Tier.NVME]
    first = slots.free_slots()[-1]
    taken = slots.try_take(1)
    assert taken is not None and taken[0] == first
    slots.give_last(taken)
    assert slots.free_slots()[0] == first and slots.num_used == 0
    runtime.check_integrity()
    runtime.shutdown()


@pytest.mark.parametrize("spared", [True, False])
def test_a_device_that_is_to_be_spared_gets_only_what_somebody_holds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spared: bool
) -> None:
    runtime = start(tmp_path)
    monkeypatch.setattr(type(runtime.cache.mover), "spares_nvme", property(lambda self: spared))
    held = serve(runtime, "held", PROMPT)
    runtime.pause(held)
    runtime.close(serve(runtime, "cached", np.arange(500, 500 + 3 * BLOCK, dtype=np.int32)))
    table = runtime.cache.table
    everything = table.on_tier(Tier.HBM)
    push_down(runtime, everything, Tier.DRAM)
    begun = runtime.cache.room.demote(everything, Tier.DRAM, runtime.clock())
    settle(runtime)
    expected = held.block_ids if spared else everything
    assert sorted(begun.tolist()) == sorted(expected.tolist())
    runtime.check_integrity()
    runtime.shutdown()
