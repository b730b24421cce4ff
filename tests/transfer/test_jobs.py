from __future__ import annotations

import threading

from tests.conformance.transfer_suite import job

from dflash2.transfer.jobs import Batch, JobQueue, PendingJob
from dflash2.types import Tier, Urgency


def pending(ticket: int, count: int, urgency: Urgency = Urgency.DEMAND, batch: int = 4) -> PendingJob:
    return PendingJob(ticket, job(Tier.DRAM, Tier.HBM, range(count), range(count), urgency=urgency), 0.0, batch)


def drain(queue: JobQueue) -> list[tuple[int, int, int]]:
    taken = []
    while (batch := queue.take(wait=False)) is not None:
        taken.append((batch.pending.ticket, batch.start, batch.stop))
    return taken


def test_jobs_are_cut_into_batches() -> None:
    queue = JobQueue()
    queue.put(pending(1, 10))
    queue.put(pending(2, 1))
    assert drain(queue) == [(1, 0, 4), (1, 4, 8), (1, 8, 10), (2, 0, 1)]


def test_urgency_orders_and_interleaves() -> None:
    queue = JobQueue()
    queue.put(pending(1, 6, Urgency.SPECULATIVE))
    queue.put(pending(2, 6, Urgency.DEMOTION))
    first = queue.take(wait=False)
    assert first is not None
    assert first.pending.ticket == 2
    queue.put(pending(3, 5, Urgency.DEMAND))
    assert drain(queue) == [(3, 0, 4), (3, 4, 5), (2, 4, 6), (1, 0, 4), (1, 4, 6)]


def test_only_unstarted_jobs_are_removed() -> None:
    queue = JobQueue()
    for ticket in (1, 2, 3):
        queue.put(pending(ticket, 8))
    assert isinstance(queue.take(wait=False), Batch)
    assert queue.remove_unstarted(1) == []
    assert [p.ticket for p in queue.remove_unstarted(3)] == [3]
    assert [p.ticket for p in queue.remove_unstarted()] == [2]
    assert [(b.pending.ticket, b.start, b.stop) for b in queue.remove_rest()] == [(1, 4, 8)]
    assert drain(queue) == []


def test_close_wakes_the_taker_after_what_is_queued() -> None:
    queue = JobQueue()
    got: list[Batch | None] = []
    taker = threading.Thread(target=lambda: got.extend([queue.take(wait=True), queue.take(wait=True)]))
    taker.start()
    queue.put(pending(1, 3))
    queue.close()
    taker.join(10.0)
    assert not taker.is_alive()
    assert got[0] is not None
    assert got[1] is None
