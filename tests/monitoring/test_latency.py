"""What counts as queue time, TTFT and TPOT; and the reference engine that tells it."""

from __future__ import annotations

import pytest
from tests.fakes.engine_world import EngineWorld

from dflash2.monitoring.latency import RequestLatencies


def test_one_request() -> None:
    latencies = RequestLatencies()
    latencies.on_arrival("a", 10.0)
    latencies.on_step(["a"], 10.5)
    latencies.on_step(["a"], 10.7)
    for now in (11.0, 11.5, 12.0):
        latencies.on_token("a", 0, now)
    latencies.on_branch_end("a", 0, 12.0)
    latencies.on_end("a")
    assert (latencies.queue.as_dict()["count"], latencies.queue.as_dict()["sum_s"]) == (1, 0.5)
    assert (latencies.ttft.as_dict()["count"], latencies.ttft.as_dict()["sum_s"]) == (1, 1.0)
    assert (latencies.tpot.as_dict()["count"], latencies.tpot.as_dict()["sum_s"]) == (1, 0.5)


def test_branches_share_the_first_token_and_have_a_pace_each() -> None:
    latencies = RequestLatencies()
    latencies.on_arrival("a", 0.0)
    for now, branches in ((1.0, (0, 1)), (2.0, (0, 1)), (3.0, (1,))):
        for branch in branches:
            latencies.on_token("a", branch, now)
    latencies.on_branch_end("a", 0, 2.0)
    latencies.on_branch_end("a", 1, 3.0)
    latencies.on_end("a")
    assert latencies.ttft.as_dict()["count"] == 1
    assert (latencies.tpot.as_dict()["count"], latencies.tpot.as_dict()["sum_s"]) == (2, 2.0)


def test_a_request_that_ended_early_leaves_nothing_behind() -> None:
    latencies = RequestLatencies()
    latencies.on_arrival("a", 0.0)
    latencies.on_branch_end("a", 0, 1.0)
    latencies.on_end("a")
    assert latencies.as_dict()["ttft"]["count"] == latencies.as_dict()["tpot"]["count"] == 0
    assert latencies._arrived_s == {} and latencies._branches == {} and latencies._queued == set()


def test_the_engine_tells_all_of_it() -> None:
    world = EngineWorld((16, 16, 32))
    world.add_random(12)
    world.engine.cancel("q3")
    world.run(2_000)
    told = world.engine.stats()["latency"]
    assert told["ttft"]["count"] == 11 and told["queue"]["count"] == 11
    assert told["tpot"]["count"] == 11 and told["tpot"]["sum_s"] / 11 == pytest.approx(world.step_s, rel=10)
    assert told["queue"]["sum_s"] <= told["ttft"]["sum_s"]
    latencies = world.engine._latencies
    assert latencies._arrived_s == {} and latencies._branches == {}
