"""Keys of pages and the clock of turnover."""

from __future__ import annotations

from dflash2.integrations.sglang.clock import TURNOVER_S, TurnoverClock
from dflash2.integrations.sglang.keys import block_keys
from dflash2.table.keys import KeyNamespace
from dflash2.types import KEY_BYTES

HASHES = ["00" * 32, "01" + "00" * 31]
BASE = {"model": "m", "weights_version": "1", "dtype": "float32", "block_size": 16, "rank": 0, "world_size": 1}


def test_nothing_is_shared_between_settings() -> None:
    variants = [BASE]
    variants += [{**BASE, name: value} for name, value in (("model", "n"), ("weights_version", "2"), ("dtype", "x"))]
    variants += [{**BASE, "block_size": 32}, {**BASE, "rank": 1}, {**BASE, "world_size": 2}]
    keys = [key for variant in variants for key in block_keys(KeyNamespace(**variant).root(), HASHES)]  # type: ignore[arg-type]
    assert len(set(keys)) == len(keys)
    assert {len(key) for key in keys} == {KEY_BYTES}


def test_keys_are_the_same_in_another_process() -> None:
    first = block_keys(KeyNamespace(**BASE).root(), HASHES)  # type: ignore[arg-type]
    assert first == block_keys(KeyNamespace(**BASE).root(), HASHES)  # type: ignore[arg-type]


def test_one_turnover_of_the_pool_is_the_policys_horizon() -> None:
    clock = TurnoverClock(50)
    assert clock() == 0.0
    clock.advance(25)
    clock.advance(25)
    assert clock() == TURNOVER_S
