"""Promises at admission: by expected length, given once, taken back."""

from __future__ import annotations

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
def runtime() -> Runtime:
    memory = '{"hbm_capacity_mb": 1, "dram_capacity_mb": 1, "staging_buffer_size_mb": 1}'
    made = create_runtime(
        parse_config(f'{{"enable": true, "kv_block": {{"block_size": 8}}, "memory": {memory}}}'),
        LAYOUT,
        KeyNamespace("m", "1", "float32", 8),
    )
    yield made
    made.shutdown()


def give(promises: Promises, rid: str, produced: int = 0) -> bool:
    return promises.try_give(rid, PROMPT, MAX_NEW, produced, None)


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
