"""Keys of pages and the clock of turnover."""

from __future__ import annotations

from typing import Any

from dflash2.integrations.sglang.clock import TURNOVER_S, TurnoverClock
from dflash2.integrations.sglang.keys import PageKeys
from dflash2.table.keys import KeyNamespace
from dflash2.types import KEY_BYTES

HASHES = ["00" * 32, "01" + "00" * 31]
BASE: dict[str, Any] = {
    "model": "m",
    "weights_version": "1",
    "dtype": "float32",
    "block_size": 16,
    "rank": 0,
    "world_size": 1,
}


def page_keys(weights: str = "w", **changed: Any) -> PageKeys:
    return PageKeys(KeyNamespace(**{**BASE, **changed}), lambda: weights)


def test_nothing_is_shared_between_settings() -> None:
    variants = [page_keys(), page_keys("other"), page_keys(model="n"), page_keys(weights_version="2")]
    variants += [page_keys(dtype="x"), page_keys(block_size=32), page_keys(rank=1), page_keys(world_size=2)]
    keys = [key for variant in variants for key in variant.of(HASHES)]
    assert len(set(keys)) == len(keys)
    assert {len(key) for key in keys} == {KEY_BYTES}


def test_keys_are_the_same_in_another_process() -> None:
    assert page_keys().of(HASHES) == page_keys().of(HASHES)


def test_what_changed_weights_compute_on_old_kv_is_found_by_nobody_else() -> None:
    weights = ["old"]
    keys = PageKeys(KeyNamespace(**BASE), lambda: weights[0])
    old = keys.of(HASHES)
    weights[0] = "new"
    keys.weights_changed()
    mixed = keys.of(HASHES)
    assert mixed == keys.of(HASHES)  # but by itself
    assert set(mixed).isdisjoint(old + page_keys("new").of(HASHES))
    keys.weights_changed()
    assert set(keys.of(HASHES)).isdisjoint(mixed)
    keys.renew()
    assert keys.of(HASHES) == page_keys("new").of(HASHES)


def test_an_update_between_two_flushes_leaves_the_new_weights_their_keys() -> None:
    keys = page_keys()
    keys.renew()
    keys.weights_changed()
    assert keys.of(HASHES) == page_keys().of(HASHES)


def test_one_turnover_of_the_pool_is_the_policys_horizon() -> None:
    clock = TurnoverClock(50)
    assert clock() == 0.0
    clock.advance(25)
    clock.advance(25)
    assert clock() == TURNOVER_S
