"""Promises at admission: by expected length, given once, taken back."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from dflash2.build import create_runtime
from dflash2.config import parse_config
from dflash2.integrations.sglang.promises import Promises
from dflash2.policy.base import Outcome
from dflash2.runtime import Runtime
from dflash2.table.keys import KeyNamespace
from dflash2.types import KVLayout

LAYOUT = KVLayout(num_layers=1, num_kv_heads=1, head_dim=64, block_size=8, dtype="float32")
PROMPT, MAX_NEW = 80, 200


@pytest.fixture
def runtime() -> Iterator[Runtime]:
    made = create()
    yield made
    made.shutdown()


def create() -> Runtime:
    memory = '{"hbm_capacity_mb": 1, "dram_capacity_mb": 1, "staging_buffer_size_mb": 1}'
    return create_runtime(
        parse_config(f'{{"enable": true, "kv_block": {{"block_size": 8}}, "memory": {memory}}}'),
        LAYOUT,
        KeyNamespace("m", "1", "float32", 8),
    )


def give(
    promises: Promises,
    rid: str,
    produced: int = 0,
    on_any_rank: Callable[[bool], bool] = bool,
    *,
    nobody_runs: bool = False,
) -> bool:
    return promises.try_give(rid, PROMPT, MAX_NEW, produced, None, on_any_rank, nobody_runs=nobody_runs)


class Ranks:
    """Two threads that ask each other, as ranks do; a rank that asks alone waits in vain."""

    def __init__(self) -> None:
        self.barrier = threading.Barrier(2)
        self.said = [False, False]

    def on_any_rank(self, rank: int, here: bool) -> bool:
        self.said[rank] = here
        self.barrier.wait(30)
        found = any(self.said)
        self.barrier.wait(30)
        return found


def test_a_promise_is_given_once_and_taken_back(runtime: Runtime) -> None:
    promises = Promises(runtime)
    assert give(promises, "r")
    assert give(promises, "r")
    assert runtime.ledger.num_promised == (PROMPT + MAX_NEW) // 8
    promises.take_back("r")
    promises.take_back("r")
    promises.ended("r", None)
    promises.ended("unknown", Outcome("stop", 3))
    assert runtime.ledger.num_promised == 0


def test_what_does_not_fit_is_refused_until_another_ends(runtime: Runtime) -> None:
    promises = Promises(runtime)
    admitted = [rid for rid in map(str, range(20)) if give(promises, rid)]
    assert 0 < len(admitted) < 20
    promises.ended(admitted[0], Outcome("stop", 5))
    assert give(promises, "another")


def test_it_learns_how_long_answers_are(runtime: Runtime) -> None:
    promises = Promises(runtime)
    for rid in map(str, range(40)):
        assert give(promises, rid)
        promises.ended(rid, Outcome("stop", 20))
    assert give(promises, "next")
    assert runtime.ledger.num_promised < (PROMPT + 40) // 8
    assert give(promises, "next", produced=100)  # it was retracted, and is longer than expected
    assert runtime.ledger.num_promised >= (PROMPT + 100) // 8


def fill_up_with_short_ones(promises: Promises, expected: int = 20) -> list[str]:
    """Answers were short so far, so each request is promised little; as many are admitted as fit."""
    for rid in map(str, range(40)):
        assert give(promises, rid)
        promises.ended(rid, Outcome("stop", expected))
    rids = [f"short {number}" for number in range(200)]
    return [rid for rid in rids if give(promises, rid)]


def test_one_that_was_retracted_keeps_its_old_promise_when_it_is_refused_a_larger_one(runtime: Runtime) -> None:
    promises = Promises(runtime)
    admitted = fill_up_with_short_ones(promises)
    before = runtime.ledger.promised_to(admitted[0])
    assert not give(promises, admitted[0], produced=MAX_NEW - 1)
    assert runtime.ledger.promised_to(admitted[0]) == before
    assert not give(promises, "another")  # what it keeps is nobody else's
    for rid in admitted[1:10]:
        promises.ended(rid, Outcome("stop", 20))
    assert give(promises, admitted[0], produced=MAX_NEW - 1)
    assert runtime.ledger.promised_to(admitted[0]) == (PROMPT + MAX_NEW) // 8


def test_where_nobody_runs_a_retracted_request_goes_on_and_a_new_one_waits(runtime: Runtime) -> None:
    promises = Promises(runtime)
    retracted = fill_up_with_short_ones(promises)
    before = runtime.ledger.num_promised
    assert not give(promises, "new", nobody_runs=True)
    assert give(promises, retracted[0], produced=MAX_NEW - 1, nobody_runs=True)
    assert runtime.ledger.num_promised == before


def test_a_retracted_request_is_refused_more_by_all_ranks_if_by_one(runtime: Runtime) -> None:
    promises = Promises(runtime)
    fill_up_with_short_ones(promises, expected=20)
    for rid in [f"short {number}" for number in range(10)]:
        promises.ended(rid, Outcome("stop", 20))
    rid = "short 10"
    before = runtime.ledger.promised_to(rid)
    assert not give(promises, rid, produced=MAX_NEW - 1, on_any_rank=lambda here: True)
    assert runtime.ledger.promised_to(rid) == before
    assert give(promises, rid, produced=MAX_NEW - 1)


def test_ranks_admit_alike_though_one_has_lost_slots(runtime: Runtime) -> None:
    other, ranks = create(), Ranks()
    other.ledger.shrink(runtime.ledger.num_blocks - 2 * (PROMPT + MAX_NEW) // 8)

    def admit(rank: int) -> tuple[list[bool], int]:
        mine = [runtime, other][rank]
        promises = Promises(mine)
        given = [give(promises, str(i), on_any_rank=lambda here: ranks.on_any_rank(rank, here)) for i in range(20)]
        promises.ended(str(given.index(True)), Outcome("stop", 5))
        given.append(give(promises, "another", on_any_rank=lambda here: ranks.on_any_rank(rank, here)))
        return given, mine.ledger.num_promised

    with ThreadPoolExecutor(2) as threads:
        one, two = threads.map(admit, range(2))
    other.shutdown()
    assert one == two
    assert 0 < sum(one[0]) < 20 and one[0][-1]
