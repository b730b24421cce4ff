from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest
from tests.conformance.transfer_suite import job, run
from tests.pools.blocks import LAYOUT, dram_pool, nvme_pool, write_blocks

from dflash2.pools.file_wrappers import GatedFiles, payload_reads
from dflash2.pools.fileops import OsFileOps
from dflash2.pools.nvme import NvmeOptions
from dflash2.transfer.engine import ThreadedTransferEngine
from dflash2.transfer.pacing import PacingOptions, WritePacer
from dflash2.types import Tier, Urgency


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def pacer(options: PacingOptions | None = None, clock: Clock | None = None) -> WritePacer:
    return WritePacer(options or PacingOptions(), lambda: False, clock or Clock())


def test_back_pressure_begins_late_and_ends_later() -> None:
    paced = pacer()
    for _ in range(20):
        paced.after_batch(1_000_000, 0.001)
    assert not paced.is_pressed
    assert paced.max_blocks(1 << 20) is None
    for _ in range(10):
        paced.after_batch(1_000_000, 0.003)  # three times as slow: not yet
    assert not paced.is_pressed
    for _ in range(10):
        paced.after_batch(1_000_000, 0.015)
    assert paced.is_pressed
    assert paced.max_blocks(1 << 20) == 4
    assert paced.max_blocks(64 << 20) == 1
    for _ in range(10):
        paced.after_batch(1_000_000, 0.005)  # better, but not good
    assert paced.is_pressed
    for _ in range(20):
        paced.after_batch(1_000_000, 0.001)
    assert not paced.is_pressed


def test_one_batch_of_a_stopped_process_does_not_become_what_is_usual() -> None:
    paced = pacer()
    for took_s in [0.001] * 100 + [10.0] + [0.001] * 20:
        paced.after_batch(1_000_000, took_s)
    assert not paced.is_pressed
    for _ in range(20):
        paced.after_batch(1_000_000, 0.010)
    assert paced.is_pressed, "ten times as slow as usual"


def test_back_pressure_ends_with_what_it_keeps_from_being_seen() -> None:
    clock = Clock()
    paced = pacer(clock=clock)
    for took_s in [0.001] * 20 + [0.015] * 10:
        paced.after_batch(1_000_000, took_s)
    assert paced.is_pressed
    clock.now += 1.0  # nothing was stored since
    assert not paced.is_pressed
    assert paced.max_blocks(1 << 20) == 4  # a small batch finds out
    paced.after_batch(1_000_000, 0.015)
    assert paced.is_pressed


def test_one_batch_says_little_however_long_it_took() -> None:
    paced = pacer()
    for took_s in [0.001] * 20 + [60.0] + [0.001] * 4:
        paced.after_batch(1_000_000, took_s)
    assert not paced.is_pressed


def test_one_lucky_batch_does_not_make_the_device_look_slow() -> None:
    paced = pacer()
    for took_s in [0.010] * 20 + [0.0001] + [0.010] * 20:
        paced.after_batch(1_000_000, took_s)
        assert not paced.is_pressed


def test_a_device_that_stays_slow_becomes_the_usual_one() -> None:
    paced = pacer()
    for _ in range(100):
        paced.after_batch(1_000_000, 0.001)
    for _ in range(20):
        paced.after_batch(1_000_000, 0.010)
    assert paced.is_pressed
    for _ in range(5_000):
        paced.after_batch(1_000_000, 0.010)
    assert not paced.is_pressed


def test_a_batch_of_which_nothing_arrived_teaches_nothing() -> None:
    paced = pacer()
    paced.after_batch(1_000_000, 0.001)
    paced.after_batch(0, 50.0)
    assert not paced.is_pressed


def test_the_endurance_budget_is_a_day_and_refills_steadily() -> None:
    clock = Clock()
    paced = pacer(PacingOptions(bytes_per_day=86_400), clock)
    early = Urgency.SPECULATIVE
    assert paced.try_spend(85_000, early) and not paced.is_spent
    assert not paced.try_spend(1_401, early) and not paced.is_spent
    assert paced.try_spend(1_400, early) and paced.is_spent
    assert not paced.try_spend(1, early)
    clock.now += 10
    assert paced.try_spend(10, early)
    assert not paced.try_spend(1, early)
    clock.now += 10 * 86_400
    assert not paced.try_spend(86_401, early)
    assert paced.try_spend(86_400, early)


def test_what_running_requests_need_is_stored_beyond_the_budget_and_then_missing_from_it() -> None:
    clock = Clock()
    paced = pacer(PacingOptions(bytes_per_day=86_400), clock)
    assert paced.try_spend(86_400 + 100, Urgency.DEMOTION) and paced.is_spent
    clock.now += 100
    assert paced.is_spent and not paced.try_spend(1, Urgency.SPECULATIVE)
    clock.now += 1
    assert paced.try_spend(1, Urgency.SPECULATIVE) and paced.is_spent
    clock.now += 1_000
    assert not paced.is_spent


def test_stores_yield_to_urgent_loads_for_a_bounded_time() -> None:
    waiting = threading.Event()
    waiting.set()
    paced = WritePacer(PacingOptions(max_yield_s=30.0), waiting.is_set, time.monotonic)
    done = threading.Event()

    def store() -> None:
        paced.before_batch(Urgency.DEMOTION)
        done.set()

    thread = threading.Thread(target=store)
    thread.start()
    assert not done.wait(0.05)
    waiting.clear()
    assert done.wait(10.0)
    thread.join()
    waiting.set()
    paced.before_batch(Urgency.DEMAND)  # does not wait
    WritePacer(PacingOptions(max_yield_s=0.01), waiting.is_set).before_batch(Urgency.DEMOTION)  # gives up
    paced.stop()
    paced.before_batch(Urgency.DEMOTION)


@pytest.mark.usefixtures("short_bursts")
def test_stores_over_budget_fail_and_leave_the_rest_alone(tmp_path: Path) -> None:
    dram, nvme = dram_pool(tmp_path), nvme_pool(tmp_path)
    pacing = PacingOptions(bytes_per_day=4 * LAYOUT.stride_bytes)
    engine = ThreadedTransferEngine({Tier.DRAM: dram, Tier.NVME: nvme}, 0, swap_batch_size=2, pacing=pacing)
    write_blocks(dram, range(8), range(8))
    (done,) = run(engine, job(Tier.DRAM, Tier.NVME, range(8), range(8), range(8), Urgency.SPECULATIVE))
    assert done.ok.tolist() == [True] * 4 + [False] * 4
    assert not done.bad_source.any()
    assert engine.stats().failures == {"endurance budget": 4}
    assert engine.is_pressed
    (back,) = run(engine, job(Tier.NVME, Tier.DRAM, range(4), range(8, 12), range(4)))
    assert back.ok.all()
    engine.close(10.0)
    engine.check_integrity()
    nvme.close()


@pytest.mark.parametrize("urgency", [Urgency.DEMOTION, Urgency.SPECULATIVE])
def test_a_store_starts_after_the_load_that_waits(tmp_path: Path, urgency: Urgency) -> None:
    gate = threading.Event()
    nvme = nvme_pool(tmp_path, options=NvmeOptions(files=GatedFiles(OsFileOps(), payload_reads, gate)))
    dram = dram_pool(tmp_path)
    write_blocks(nvme, [1], [1])
    engine = ThreadedTransferEngine({Tier.DRAM: dram, Tier.NVME: nvme}, 0, pacing=PacingOptions(max_yield_s=30.0))
    load = engine.submit(job(Tier.NVME, Tier.DRAM, [1], [1], [1]))
    store = engine.submit(job(Tier.DRAM, Tier.NVME, [2], [2], [2], urgency))
    assert not engine.wait([store], 0.05)
    gate.set()
    assert engine.wait([load, store], 10.0)
    assert all(done.ok.all() for done in engine.poll())
    engine.close(10.0)
    nvme.close()
