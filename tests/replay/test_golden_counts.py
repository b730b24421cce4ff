"""Exact counts over the kept trace. Those of LRU, FIFO, LFU and ARC were checked against libCacheSim once."""

from __future__ import annotations

import pytest
from tests.replay.running import events_of, run_trace
from tests.replay.small_trace import SMALL_TRACE, as_text, make_small_trace

from dflash2.config import Config
from dflash2.replay.caches import Classical, Managed, make_replayed
from dflash2.replay.classical.lru import LRU
from dflash2.replay.managed import BlockNames, BlockSize
from dflash2.replay.run import replay
from dflash2.types import Tier

SIZES = (16, 64, 256, 1024)
HITS = {
    "lru": (701, 1533, 4829, 5240),
    "lru-tail": (1049, 1676, 4829, 5240),
    "fifo": (542, 1267, 4014, 5094),
    "lfu": (1237, 1373, 2270, 4678),
    "s3-fifo": (1247, 1976, 3751, 5259),
    "arc": (1242, 1720, 4542, 5159),
    "w-tinylfu": (1402, 1920, 2741, 4409),
    "opt": (1945, 3960, 5212, 5489),
}
REFERENCES = 7628


def test_the_kept_trace_is_what_its_generator_makes() -> None:
    assert SMALL_TRACE.read_text() == as_text(make_small_trace())


@pytest.mark.parametrize("policy", HITS)
def test_hits_are_exact(policy: str) -> None:
    results = run_trace(SMALL_TRACE, (policy,), SIZES)
    assert tuple(result.outcomes.num_hits for result in results) == HITS[policy]
    assert {result.outcomes.num_references for result in results} == {REFERENCES}


def test_the_products_lru_counts_as_lru_that_touches_the_tail_first() -> None:
    """The one goes through page table, manager and room, the other is twenty lines."""
    for size in SIZES[:3]:
        slots = {Tier.HBM: size}
        product = make_replayed("lru-tail", slots, Config(), BlockSize(512, 1024), BlockNames())
        textbook = Classical("lru-tail", slots, LRU(size), last_first=True)
        assert isinstance(product, Managed)
        replay(events_of(SMALL_TRACE.read_text()), (product, textbook))
        assert product.outcomes().hits == textbook.outcomes().hits
        product.cache.check_integrity()


def test_no_online_policy_beats_the_optimum() -> None:
    results = run_trace(SMALL_TRACE, ("heat", *HITS), (64,))
    best = next(one.outcomes.num_hits for one in results if one.policy == "opt")
    assert all(one.outcomes.num_hits <= best for one in results)
