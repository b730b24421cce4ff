from __future__ import annotations

from dflash2.monitoring.computed_keys import ComputedKeys
from dflash2.monitoring.counters import CacheCounters
from dflash2.types import Tier


def test_rates_before_anything_happened() -> None:
    counters = CacheCounters()
    assert (counters.hbm_hit_rate, counters.prefix_hit_rate) == (1.0, 0.0)


def test_rates() -> None:
    counters = CacheCounters(used_blocks=8, used_in_hbm_blocks=6, looked_up_tokens=100)
    counters.hit_tokens[Tier.HBM], counters.hit_tokens[Tier.NVME] = 20, 5
    assert (counters.hbm_hit_rate, counters.prefix_hit_rate) == (0.75, 0.25)


def test_flat_names_every_counter_once() -> None:
    counters = CacheCounters(swap_in_blocks=7)
    counters.hit_tokens[Tier.DRAM] = 3
    flat = list(counters.flat())
    assert len({name for name, _ in flat}) == len(flat) == len(CacheCounters.__slots__) + len(Tier) - 1
    assert dict(flat)["swap_in_blocks"] == 7
    assert [dict(flat)[f"hit_tokens_{tier.label}"] for tier in Tier] == [0, 3, 0]
    assert all(isinstance(value, int) for _, value in flat)


def test_two_counters_share_nothing() -> None:
    one, other = CacheCounters(), CacheCounters()
    one.hit_tokens[Tier.HBM] += 1
    assert other.hit_tokens[Tier.HBM] == 0


def test_a_key_is_recomputed_the_second_time() -> None:
    keys = ComputedKeys()
    assert [keys.note(b"a" * 32), keys.note(b"b" * 32), keys.note(b"a" * 32)] == [False, False, True]


def test_the_memory_of_keys_is_bounded() -> None:
    keys = ComputedKeys(limit=2)
    for letter in (b"a", b"b", b"c"):
        assert not keys.note(letter * 32)
    assert keys.note(b"c" * 32)
    assert not keys.note(b"a" * 32)
