"""Whoever sees only the beginning of a trace must do the same with it as who sees the whole."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.replay.running import make_plan, run_trace, silent
from tests.replay.small_trace import SMALL_TRACE

from dflash2.replay.caches import OPT, policy_names
from dflash2.replay.session import run_plan
from dflash2.types import Tier

SHARED = 350
"""Requests of the beginning."""
SEVERAL_TIERS = {Tier.HBM: 64, Tier.DRAM: 96, Tier.NVME: 256}


@pytest.fixture(scope="module")
def beginning(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("traces") / "beginning.jsonl"
    path.write_text("".join(SMALL_TRACE.read_text().splitlines(keepends=True)[:SHARED]))
    return path


@pytest.mark.parametrize("policy", [name for name in policy_names(single_tier=True) if name != OPT])
def test_one_tier(policy: str, beginning: Path) -> None:
    whole = run_trace(SMALL_TRACE, (policy,), (64,))
    part = run_trace(beginning, (policy,), (64,))
    for seen_whole, seen_part in zip(whole, part, strict=True):
        assert seen_part.outcomes.hits == seen_whole.outcomes.hits[:SHARED]


@pytest.mark.parametrize("policy", policy_names(single_tier=False))
def test_several_tiers(policy: str, beginning: Path) -> None:
    (whole,) = run_plan(make_plan(SMALL_TRACE, (policy,), [SEVERAL_TIERS]), silent())
    (part,) = run_plan(make_plan(beginning, (policy,), [SEVERAL_TIERS]), silent())
    assert part.outcomes.hits == whole.outcomes.hits[:SHARED]
    assert any(dram or nvme for _, dram, nvme in part.outcomes.hits)
