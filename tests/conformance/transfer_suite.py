"""What every transfer engine must do. Subclass it and give ``pools`` (three tiers) and ``engine`` fixtures."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

import numpy as np
import pytest
from tests.pools.blocks import NUM_SLOTS, assert_blocks, keys_of, slots_of, write_blocks

from dflash2.pools.base import BlockPool
from dflash2.transfer.base import Completion, CopyJob, TransferEngine
from dflash2.types import Tier, Urgency

Pools = Mapping[Tier, BlockPool]
PAIRS = [pair for pair in itertools.product(Tier, Tier) if pair[0] is not pair[1]]


def job(
    src: Tier,
    dst: Tier,
    src_slots: Sequence[int],
    dst_slots: Sequence[int],
    keys: Sequence[int] | None = None,
    urgency: Urgency = Urgency.DEMAND,
) -> CopyJob:
    return CopyJob(src, dst, slots_of(src_slots), slots_of(dst_slots), urgency, None if keys is None else keys_of(keys))


def run(engine: TransferEngine, *jobs: CopyJob) -> list[Completion]:
    """Submit, wait, and return the completions in the order of ``jobs``."""
    tickets = [engine.submit(each) for each in jobs]
    assert engine.wait(tickets, 30.0)
    by_ticket = {done.ticket: done for done in engine.poll()}
    assert sorted(by_ticket) == sorted(tickets)
    return [by_ticket[ticket] for ticket in tickets]


class TransferSuite:
    @pytest.mark.parametrize(("src", "dst"), PAIRS, ids=lambda tier: tier.label)
    @pytest.mark.parametrize("slots", [[5], [2, 3, 4, 5, 6, 7, 8, 9, 10], [13, 0, 7, 2, 11, 3]], ids=len)
    def test_blocks_arrive_between_any_two_tiers(
        self, pools: Pools, engine: TransferEngine, src: Tier, dst: Tier, slots: list[int]
    ) -> None:
        targets = [NUM_SLOTS - 1 - slot for slot in reversed(slots)]
        keys = [slot + 50 for slot in slots]
        write_blocks(pools[src], slots, keys)
        write_blocks(pools[dst], range(NUM_SLOTS), range(900, 900 + NUM_SLOTS))
        (done,) = run(engine, job(src, dst, slots, targets, keys))
        assert done.ok.all()
        assert not done.bad_source.any()
        assert_blocks(pools[dst], targets, keys)
        assert_blocks(pools[src], slots, keys)
        others = [slot for slot in range(NUM_SLOTS) if slot not in targets]
        assert_blocks(pools[dst], others, [900 + slot for slot in others])
        engine.check_integrity()

    def test_many_jobs_in_all_directions_at_once(self, pools: Pools, engine: TransferEngine) -> None:
        """Each pair of tiers moves two blocks of its own."""
        jobs, expected = [], []
        for index, (src, dst) in enumerate(PAIRS):
            slots, keys = [2 * index, 2 * index + 1], [index * 10, index * 10 + 1]
            write_blocks(pools[src], slots, keys)
            jobs.append(job(src, dst, slots, slots, keys, list(Urgency)[index % 3]))
            expected.append((dst, slots, keys))
        assert all(done.ok.all() for done in run(engine, *jobs))
        for dst, slots, keys in expected:
            assert_blocks(pools[dst], slots, keys)
        engine.check_integrity()

    def test_each_completion_is_reported_once(self, pools: Pools, engine: TransferEngine) -> None:
        write_blocks(pools[Tier.DRAM], [0], [1])
        ticket = engine.submit(job(Tier.DRAM, Tier.HBM, [0], [0]))
        assert engine.wait([ticket], 30.0)
        (done,) = engine.poll()
        assert done.ticket == ticket
        assert done.wall_s >= 0
        assert engine.poll() == []
        assert engine.wait([ticket], 0.0)

    def test_an_empty_job_ends_at_once(self, engine: TransferEngine) -> None:
        (done,) = run(engine, job(Tier.DRAM, Tier.HBM, [], []))
        assert done.ok.shape == (0,)

    def test_a_source_that_holds_nothing_is_reported_as_bad(self, pools: Pools, engine: TransferEngine) -> None:
        write_blocks(pools[Tier.NVME], [1, 3], [1, 3])
        for dst in (Tier.DRAM, Tier.HBM):
            (done,) = run(engine, job(Tier.NVME, dst, [1, 2, 3], [4, 5, 6], [1, 2, 3]))
            assert done.ok.tolist() == [True, False, True]
            assert done.bad_source.tolist() == [False, True, False]
            assert_blocks(pools[dst], [4, 6], [1, 3])

    def test_a_block_under_another_key_is_refused(self, pools: Pools, engine: TransferEngine) -> None:
        write_blocks(pools[Tier.NVME], [1, 2], [1, 2])
        (done,) = run(engine, job(Tier.NVME, Tier.DRAM, [1, 2], [1, 2], [1, 99]))
        assert done.ok.tolist() == [True, False]
        assert done.bad_source.tolist() == [False, True]

    def test_impossible_jobs_are_refused_before_anything_moves(self, engine: TransferEngine) -> None:
        for wrong in (
            job(Tier.DRAM, Tier.DRAM, [0], [1]),
            job(Tier.DRAM, Tier.HBM, [0, 1], [1]),
            job(Tier.DRAM, Tier.HBM, [NUM_SLOTS], [0]),
            job(Tier.DRAM, Tier.HBM, [0], [-1]),
            job(Tier.DRAM, Tier.NVME, [0, 1], [0, 1], [1]),
        ):
            with pytest.raises(ValueError, match=r"route|destinations|outside"):
                engine.submit(wrong)
        assert engine.poll() == []

    def test_a_job_of_unknown_number_cannot_be_cancelled(self, engine: TransferEngine) -> None:
        assert not engine.cancel(12345)
        (done,) = run(engine, job(Tier.DRAM, Tier.HBM, [0], [0]))
        assert not engine.cancel(done.ticket)

    def test_close_ends_every_job_and_refuses_new_ones(self, pools: Pools, engine: TransferEngine) -> None:
        tickets = [engine.submit(job(Tier.DRAM, Tier.HBM, [i], [i])) for i in range(8)]
        engine.close(10.0)
        engine.close(10.0)
        ended = engine.poll()
        assert sorted(done.ticket for done in ended) == tickets
        for done in ended:
            assert not done.bad_source.any()
        with pytest.raises(RuntimeError, match="closed"):
            engine.submit(job(Tier.DRAM, Tier.HBM, [0], [0]))
        engine.check_integrity()

    def test_a_slot_that_two_jobs_write_is_found(self, engine: TransferEngine) -> None:
        first = engine.submit(job(Tier.DRAM, Tier.HBM, [0], [5]))
        second = engine.submit(job(Tier.NVME, Tier.HBM, [0], [5]))
        with pytest.raises(Exception, match="destination of two copies"):
            engine.check_integrity()
        assert engine.wait([first, second], 30.0)
        engine.poll()
        engine.check_integrity()

    def test_results_do_not_depend_on_the_batch_size(self, pools: Pools, engine: TransferEngine) -> None:
        rng = np.random.default_rng(7)
        keys = rng.permutation(1000)[:NUM_SLOTS].tolist()
        write_blocks(pools[Tier.HBM], range(NUM_SLOTS), keys)
        there, back = rng.permutation(NUM_SLOTS).tolist(), rng.permutation(NUM_SLOTS).tolist()
        (out,) = run(engine, job(Tier.HBM, Tier.NVME, range(NUM_SLOTS), there, keys))
        (home,) = run(engine, job(Tier.NVME, Tier.HBM, there, back, keys))
        assert out.ok.all()
        assert home.ok.all()
        assert_blocks(pools[Tier.HBM], back, keys)
