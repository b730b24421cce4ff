from __future__ import annotations

import threading

from tests.conformance.transfer_suite import job

from dflash2.transfer.jobs import Batch, JobQueue, PendingJob
from dflash2.types import Tier, Urgency


def pending(ticket: int, count: int, urgency: Urgency = Urgency.DEMAND, batch: int = 4) -> PendingJob:
    return PendingJob(ticket, job(Tier.DRAM, Tier.HBM, range(count), range(count), urgency=urgency), 0.0, batch)


def take(queue: JobQueue, max_blocks: int | None = None) -> Batch | None:
    return queue.take(lambda: max_blocks)


def drain(queue: JobQueue) -> list[tuple[int, int, int]]:
    taken = []
    while any(queue.holds(urgency) for urgency in Urgency):
        batch = take(queue)
        assert batch is not None
        taken.append((batch.pending.ticket, batch.start, batch.stop))
    return taken


def test_jobs_are_cut_into_batches() -> None:
    queue = JobQueue()
    queue.put(pending(1, 10))
    queue.put(pending(2, 1))
    assert drain(queue) == [(1, 0, 4), (1, 4, 8), (1, 8, 10), (2, 0, 1)]


def test_the_taker_may_ask_for_less() -> None:
    queue = JobQueue()
    queue.put(pending(1, 6))
    sizes = [len(batch) for batch in (take(queue, 1), take(queue, 100)) if batch is not None]
    assert sizes == [1, 4] and drain(queue) == [(1, 5, 6)]


def test_urgency_orders_and_interleaves() -> None:
    queue = JobQueue()
    queue.put(pending(1, 6, Urgency.SPECULATIVE))
    queue.put(pending(2, 6, Urgency.DEMOTION))
    first = take(queue)
    assert first is not None
    assert first.pending.ticket == 2
    queue.put(pending(3, 5, Urgency.DEMAND))
    assert drain(queue) == [(3, 0, 4), (3, 4, 5), (2, 4, 6), (1, 0, 4), (1, 4, 6)]


def test_only_unstarted_jobs_are_removed() -> None:
    queue = JobQueue()
    for ticket in (1, 2, 3):
        queue.put(pending(ticket, 8))
    assert isinstance(take(queue), Batch)
    assert queue.remove_unstarted(1) == []
    assert [p.ticket for p in queue.remove_unstarted(3)] == [3]
    assert [p.ticket for p in queue.remove_unstarted()] == [2]
    assert [(b.pending.ticket, b.start, b.stop) for b in queue.remove_rest()] == [(1, 4, 8)]
    assert drain(queue) == []


def test_close_wakes_the_taker_after_what_is_queued() -> None:
    queue = JobQueue()
    got: list[Batch | None] = []
    taker = threading.Thread(target=lambda: got.extend([take(queue), take(queue)]))
    taker.start()
    queue.put(pending(1, 3))
    queue.close()
    taker.join(10.0)
    assert not taker.is_alive()
    assert got[0] is not None
    assert got[1] is None
