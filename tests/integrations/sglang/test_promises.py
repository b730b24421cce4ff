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


def give(promises: Promises, rid: str, produced: int = 0, on_any_rank: Callable[[bool], bool] = bool) -> bool:
    return promises.try_give(rid, PROMPT, MAX_NEW, produced, None, on_any_rank)


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
