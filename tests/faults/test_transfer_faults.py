"""Faults under the threaded engine: every job ends, every thread lives, only the hit blocks are lost."""

from __future__ import annotations

import errno
import logging
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.conformance.transfer_suite import job, run
from tests.pools.blocks import (
    LAYOUT,
    NUM_SLOTS,
    assert_blocks,
    dram_pool,
    nvme_pool,
    read_blocks,
    tensor_pool,
    write_blocks,
)

import dflash2.transfer.lane as lane
from dflash2.errors import CapacityError, IntegrityError
from dflash2.pools.base import BlockPool
from dflash2.pools.file_wrappers import FailingFiles, FileCall, GatedFiles, payload_reads, payload_writes
from dflash2.pools.fileops import OsFileOps
from dflash2.pools.nvme import NvmeOptions
from dflash2.pools.wrappers import CorruptPool, DelayPool, FailPool, LimitPool
from dflash2.transfer.engine import ThreadedTransferEngine
from dflash2.types import Tier, Urgency

Build = Callable[..., ThreadedTransferEngine]


@pytest.fixture
def build(tmp_path: Path) -> Iterator[Build]:
    """Engines over three tiers; keyword arguments replace a pool, ``batch`` and ``staging`` set the sizes."""
    engines: list[ThreadedTransferEngine] = []

    def make(
        hbm: BlockPool | None = None,
        dram: BlockPool | None = None,
        nvme: BlockPool | None = None,
        batch: int = 4,
        staging: int = 1 << 20,
    ) -> ThreadedTransferEngine:
        pools = {
            Tier.HBM: hbm or tensor_pool(tmp_path),
            Tier.DRAM: dram or dram_pool(tmp_path),
            Tier.NVME: nvme or nvme_pool(tmp_path),
        }
        engine = ThreadedTransferEngine(pools, staging, batch, io_threads=2)
        engines.append(engine)
        return engine

    yield make
    for engine in engines:
        engine.close(10.0)
        engine.check_integrity()


def test_no_space_on_block_7_of_32_leaves_dram_whole(build: Build, tmp_path: Path) -> None:
    room = [7 * LAYOUT.stride_bytes]
    lock = threading.Lock()

    def full(call: FileCall) -> bool:
        if not payload_writes(call):
            return False
        with lock:
            fits = call.nbytes <= room[0]
            room[0] -= call.nbytes if fits else 0
        return not fits

    nvme = nvme_pool(tmp_path, options=NvmeOptions(files=FailingFiles(OsFileOps(), full, errno.ENOSPC)))
    dram = dram_pool(tmp_path)
    engine = build(dram=dram, nvme=nvme)
    write_blocks(dram, range(16), range(16))
    (done,) = run(engine, job(Tier.DRAM, Tier.NVME, range(16), range(16), range(16)))
    assert done.ok.sum() == 7
    assert not done.bad_source.any()
    stored = [slot for slot in range(16) if done.ok[slot]]
    assert_blocks(nvme, stored, stored)
    assert_blocks(dram, range(16), range(16))
    assert all(found is None for found in read_blocks(nvme, [s for s in range(16) if s not in stored]))
    assert engine.stats().failures == {"destination": 9}


def test_an_unreadable_block_is_bad_at_the_source_and_the_threads_live(build: Build, tmp_path: Path) -> None:
    files = FailingFiles(OsFileOps(), lambda c: payload_reads(c) and c.touches(4096 + 5 * LAYOUT.stride_bytes))
    nvme, hbm = nvme_pool(tmp_path, options=NvmeOptions(files=files)), tensor_pool(tmp_path)
    engine = build(hbm=hbm, nvme=nvme)
    write_blocks(nvme, range(10), range(10))
    (done,) = run(engine, job(Tier.NVME, Tier.HBM, range(10), range(10), range(10)))
    assert done.ok.tolist() == [slot != 5 for slot in range(10)]
    assert done.bad_source.tolist() == [slot == 5 for slot in range(10)]
    (again,) = run(engine, job(Tier.NVME, Tier.DRAM, [5, 6], [0, 1], [5, 6]))
    assert again.ok.tolist() == [False, True]
    assert_blocks(hbm, [0, 4, 6, 9], [0, 4, 6, 9])
    assert engine.stats().failures == {"source": 2}


@pytest.mark.parametrize(("src", "dst"), [(Tier.HBM, Tier.NVME), (Tier.NVME, Tier.HBM), (Tier.DRAM, Tier.HBM)])
@pytest.mark.parametrize("broken_side", ["src", "dst"])
def test_a_pool_that_raises_fails_the_batch_and_blames_nobody(
    build: Build, tmp_path: Path, src: Tier, dst: Tier, broken_side: str, caplog: pytest.LogCaptureFixture
) -> None:
    pools: dict[Tier, BlockPool] = {
        Tier.HBM: tensor_pool(tmp_path),
        Tier.DRAM: dram_pool(tmp_path),
        Tier.NVME: nvme_pool(tmp_path),
    }
    write_blocks(pools[src], range(12), range(12))
    victim = src if broken_side == "src" else dst
    broken = {"now": True}
    good = pools[victim]
    pools[victim] = FailPool(good, lambda *_: broken["now"], RuntimeError("device lost"))
    engine = build(hbm=pools[Tier.HBM], dram=pools[Tier.DRAM], nvme=pools[Tier.NVME])
    with caplog.at_level(logging.WARNING):
        (done,) = run(engine, job(src, dst, range(12), range(12), range(12)))
    assert not done.ok.any()
    assert not done.bad_source.any()
    assert caplog.text.count("device lost") == 1
    broken["now"] = False
    (again,) = run(engine, job(src, dst, range(12), range(12), range(12)))
    assert again.ok.all()
    assert_blocks(good if victim is dst else pools[dst], range(12), range(12))


def test_a_full_destination_fails_the_rest_only(build: Build, tmp_path: Path) -> None:
    inner = nvme_pool(tmp_path)
    hbm = tensor_pool(tmp_path)
    engine = build(hbm=hbm, nvme=LimitPool(inner, 6))
    write_blocks(hbm, range(10), range(10))
    (done,) = run(engine, job(Tier.HBM, Tier.NVME, range(10), range(10), range(10)))
    assert done.ok.sum() == 6
    stored = [slot for slot in range(10) if done.ok[slot]]
    assert_blocks(inner, stored, stored)


def test_the_payloads_of_these_tests_show_a_single_wrong_bit(build: Build, tmp_path: Path) -> None:
    hbm, dram = tensor_pool(tmp_path), dram_pool(tmp_path)
    write_blocks(dram, range(4), range(4))
    engine = build(hbm=hbm, dram=CorruptPool(dram, lambda slot: slot == 2))
    (done,) = run(engine, job(Tier.DRAM, Tier.HBM, range(4), range(4)))
    assert done.ok.all()
    with pytest.raises(AssertionError, match="does not hold block 2"):
        assert_blocks(hbm, range(4), range(4))


def test_an_urgent_load_overtakes_between_batches(build: Build, tmp_path: Path) -> None:
    gate = threading.Event()
    order: list[int] = []
    inner = nvme_pool(tmp_path)
    write_blocks(inner, range(16), range(16))

    class Recorder(DelayPool):
        def gather(self, slots, buffer, rows, keys=None):  # type: ignore[no-untyped-def]
            self._pause()
            order.extend(slots.tolist())
            return self.inner.gather(slots, buffer, rows, keys)

    engine = build(nvme=Recorder(inner, gate=gate), batch=2)
    engine.submit(job(Tier.NVME, Tier.DRAM, range(10), range(10), urgency=Urgency.SPECULATIVE))
    engine.submit(job(Tier.NVME, Tier.DRAM, [14], [14], urgency=Urgency.DEMOTION))
    last = engine.submit(job(Tier.NVME, Tier.DRAM, [15], [15], urgency=Urgency.DEMAND))
    gate.set()
    assert engine.wait([last], 10.0)
    assert order.index(15) <= 6, f"the urgent block came after {order}"
    assert engine.wait([1, 2], 10.0)
    assert order.index(15) < order.index(14) < order.index(9)
    assert len(engine.poll()) == 3


def test_only_a_job_that_has_not_started_can_be_cancelled(build: Build, tmp_path: Path) -> None:
    gate = threading.Event()
    nvme = nvme_pool(tmp_path, options=NvmeOptions(files=GatedFiles(OsFileOps(), payload_reads, gate)))
    write_blocks(nvme, range(16), range(16))
    engine = build(nvme=nvme)
    running = engine.submit(job(Tier.NVME, Tier.HBM, range(12), range(12), range(12)))
    waiting = engine.submit(job(Tier.NVME, Tier.HBM, [13], [13], [13]))
    while not nvme._in_flight:
        pass
    assert not engine.cancel(running)
    assert engine.cancel(waiting)
    (cancelled,) = engine.poll()
    assert cancelled.ticket == waiting
    assert not cancelled.ok.any()
    assert not cancelled.bad_source.any()
    assert not engine.wait([running], 0.01)
    gate.set()
    assert engine.wait([running], 10.0)
    (done,) = engine.poll()
    assert done.ok.all()
    assert engine.stats().failures == {"cancelled": 1}


def test_staging_and_dram_full_at_once_do_not_deadlock(build: Build, tmp_path: Path) -> None:
    """Room for one block of staging, both directions wanting it, DRAM with every slot in use."""
    hbm, nvme, dram = tensor_pool(tmp_path), nvme_pool(tmp_path), dram_pool(tmp_path)
    engine = build(hbm=hbm, nvme=nvme, dram=dram, staging=LAYOUT.stride_bytes)
    half = NUM_SLOTS // 2
    write_blocks(hbm, range(half), range(half))
    write_blocks(dram, range(NUM_SLOTS), range(300, 300 + NUM_SLOTS))
    write_blocks(nvme, range(half), range(100, 100 + half))
    tickets = []
    for slot in range(half):
        tickets.append(engine.submit(job(Tier.NVME, Tier.HBM, [slot], [half + slot], [100 + slot])))
        tickets.append(engine.submit(job(Tier.HBM, Tier.NVME, [slot], [half + slot], [slot], Urgency.DEMOTION)))
    assert engine.wait(tickets, 30.0)
    assert all(done.ok.all() for done in engine.poll())
    assert_blocks(hbm, range(half, NUM_SLOTS), range(100, 100 + half))
    assert_blocks(nvme, range(half, NUM_SLOTS), range(half))
    assert_blocks(dram, range(NUM_SLOTS), range(300, 300 + NUM_SLOTS))
    assert engine.stats().staging_in_use_bytes == 0


def test_a_hanging_device_costs_its_route_and_not_the_others(
    build: Build, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stores hang and hold all staging they may; loads through staging end with a failure, at their deadline."""
    monkeypatch.setattr(lane, "STAGING_TIMEOUT_S", 0.05)
    gate = threading.Event()
    nvme = nvme_pool(tmp_path, options=NvmeOptions(files=GatedFiles(OsFileOps(), payload_writes, gate)))
    hbm, dram = tensor_pool(tmp_path), dram_pool(tmp_path)
    engine = build(hbm=hbm, dram=dram, nvme=nvme, staging=LAYOUT.stride_bytes)
    gate.set()
    write_blocks(nvme, [15], [15])
    gate.clear()
    write_blocks(hbm, range(4), range(4))
    stuck = engine.submit(job(Tier.HBM, Tier.NVME, range(4), range(4), range(4), Urgency.DEMOTION))
    while not nvme._in_flight:
        pass
    (staged,) = run(engine, job(Tier.NVME, Tier.HBM, [15], [15], [15]))
    assert not staged.ok.any()
    assert not staged.bad_source.any()
    straight, swap = run(engine, job(Tier.NVME, Tier.DRAM, [15], [1], [15]), job(Tier.HBM, Tier.DRAM, [2], [2]))
    assert straight.ok.all()
    assert swap.ok.all()
    assert set(engine.stats().failures) == {"staging timeout"}, "of the load, and of stores behind the one that hangs"
    gate.set()
    assert engine.wait([stuck], 10.0)


@pytest.mark.usefixtures("short_bursts")
def test_close_has_a_deadline_even_if_the_device_hangs(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    gate = threading.Event()
    nvme = nvme_pool(tmp_path, options=NvmeOptions(files=GatedFiles(OsFileOps(), payload_writes, gate)))
    dram = dram_pool(tmp_path)
    engine = ThreadedTransferEngine({Tier.DRAM: dram, Tier.NVME: nvme}, 0, 2, io_threads=1)
    write_blocks(dram, range(8), range(8))
    running = engine.submit(job(Tier.DRAM, Tier.NVME, range(8), range(8), range(8)))
    queued = engine.submit(job(Tier.DRAM, Tier.NVME, [9], [9], [9]))
    while not nvme._in_flight:
        pass
    with caplog.at_level(logging.ERROR):
        engine.close(0.05)
    assert "still hang" in caplog.text
    ended = {done.ticket: done for done in engine.poll()}
    assert not ended[queued].ok.any()
    assert running not in ended
    gate.set()
    assert engine.wait([running], 10.0)
    (late,) = engine.poll()
    assert late.ok.sum() <= 6, "what had not started at the deadline is dropped"
    nvme.close()


def test_a_budget_without_room_for_a_block_is_refused_only_where_staging_is_needed(tmp_path: Path) -> None:
    hbm, dram, nvme = tensor_pool(tmp_path), dram_pool(tmp_path), nvme_pool(tmp_path)
    with pytest.raises(CapacityError, match="does not hold one block"):
        ThreadedTransferEngine({Tier.HBM: hbm, Tier.DRAM: dram, Tier.NVME: nvme}, 100)
    ThreadedTransferEngine({Tier.HBM: hbm, Tier.DRAM: dram}, 0).close(5.0)
    nvme.close()


def test_pools_that_do_not_fit_together_are_refused(tmp_path: Path) -> None:
    dram = dram_pool(tmp_path)
    with pytest.raises(ValueError, match="at least two"):
        ThreadedTransferEngine({Tier.DRAM: dram}, 1 << 20)
    with pytest.raises(ValueError, match="is of tier dram"):
        ThreadedTransferEngine({Tier.HBM: dram, Tier.DRAM: dram}, 1 << 20)


def test_integrity_check_finds_a_lost_staging_chunk(tmp_path: Path) -> None:
    pools = {Tier.HBM: tensor_pool(tmp_path), Tier.NVME: nvme_pool(tmp_path)}
    engine = ThreadedTransferEngine(pools, 1 << 20, 2)
    engine.check_integrity()
    staging = engine._staging
    assert staging is not None
    chunk = staging.try_acquire()
    assert chunk is not None
    with pytest.raises(IntegrityError, match="1 staging chunks are out"):
        engine.check_integrity()
    staging.release(chunk)
    with pytest.raises(IntegrityError, match="released twice"):
        staging.release(chunk)
    engine.close(5.0)
    pools[Tier.NVME].close()


def test_statistics_add_up(build: Build, tmp_path: Path) -> None:
    dram = dram_pool(tmp_path)
    engine = build(dram=dram)
    write_blocks(dram, range(10), range(10))
    run(engine, job(Tier.DRAM, Tier.HBM, range(10), range(10)), job(Tier.DRAM, Tier.NVME, [1], [1], [1]))
    stats = engine.stats()
    swap_in = stats.routes[(Tier.DRAM, Tier.HBM)]
    assert (swap_in.num_jobs, swap_in.num_blocks, swap_in.num_failed, swap_in.queued_blocks) == (1, 10, 0, 0)
    assert swap_in.num_bytes == 10 * LAYOUT.block_bytes
    assert 0 < swap_in.latency_max_s <= swap_in.latency_sum_s
    assert stats.routes[(Tier.DRAM, Tier.NVME)].num_blocks == 1
    assert stats.failures == {}
