"""Prefix hit ratios of published tables, on traces of others where these are at hand (``../shared/traces``)."""

from __future__ import annotations

import pytest
from tests.replay.running import SHARED_TRACES, run_trace

MOONCAKE = SHARED_TRACES / "mooncake_conversation.jsonl"
RATIOS = {
    "fifo": (5.05, 31.33),
    "lru": (5.23, 34.46),
    "lfu": (5.82, 30.68),
    "s3-fifo": (7.50, 32.76),
    "arc": (6.44, 32.01),
    "w-tinylfu": (9.57, 24.32),
    "opt": (24.64, 36.64),
}


@pytest.mark.skipif(not MOONCAKE.is_file(), reason=f"{MOONCAKE} is not at hand")
@pytest.mark.parametrize("policy", RATIOS)
def test_conversations(policy: str) -> None:
    results = run_trace(MOONCAKE, (policy,), (1827, 36558))
    ratios = [100 * result.outcomes.prefix_hit_ratio for result in results]
    assert ratios == pytest.approx(RATIOS[policy], abs=0.015)


AGENTS = SHARED_TRACES / "claude_code_dev.jsonl.gz"


@pytest.mark.skipif(not AGENTS.is_file(), reason=f"{AGENTS} is not at hand")
def test_agents() -> None:
    (result,) = run_trace(AGENTS, ("lru",), (2216,))
    assert result.outcomes.num_references == 5_564_547
    assert 100 * result.outcomes.prefix_hit_ratio == pytest.approx(16.2, abs=0.05)
