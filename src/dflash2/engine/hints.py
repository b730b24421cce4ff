"""What clients say of the future: prompts that will come, and prompts whose blocks are to be kept."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from dflash2.cache.sequence import Sequence
from dflash2.engine.base import PrefetchReport, RequestHints
from dflash2.runtime import Runtime
from dflash2.types import IntArray, Tier

MAX_EXPECTED = 4
"""Announced prompts looked after at a time; a newer one takes the place of the oldest."""
KEPT_SHARE = 0.25
"""Share of all blocks that may be promised which pins may take."""


@dataclass(slots=True)
class HintCounters:
    """What was asked for since the start."""

    prefetch_hints: int = 0
    pins: int = 0
    pins_refused: int = 0
    """There was no room to keep them, or there is no tier below HBM."""


@dataclass(frozen=True, slots=True)
class _Kept:
    sequence: Sequence
    num_blocks: int
    until_s: float


class Hints:
    """Belongs to the engine's thread.

    Args:
        runtime: memory of this rank.
    """

    def __init__(self, runtime: Runtime) -> None:
        self.counters = HintCounters()
        self._runtime = runtime
        self._expected: OrderedDict[str, float] = OrderedDict()
        """Announced prompts and until when, the oldest first."""
        self._kept: dict[str, _Kept] = {}
        """By session, or by request where there is none."""

    def expect(self, token_ids: IntArray, adapter: str | None, tenant_salt: str | None, ttl_s: float) -> PrefetchReport:
        """A prompt will come soon: bring what is cached of it nearer, as far as there is free room.

        Args:
            token_ids: int32 ``[n]``.
            adapter: identity of the adapter's weights.
            tenant_salt: as in the request that will come.
            ttl_s: for how long it is expected.
        """
        runtime = self._runtime
        found = runtime.prompts.cached_tokens(token_ids, adapter=adapter, tenant_salt=tenant_salt)
        self.counters.prefetch_hints += 1
        name = f"prefetch-{self.counters.prefetch_hints}"
        runtime.prompts.arrive(name, token_ids, adapter, tenant_salt)
        self._expected[name] = runtime.clock() + ttl_s
        while len(self._expected) > MAX_EXPECTED:
            runtime.prompts.forget_arrival(self._expected.popitem(last=False)[0])
        return PrefetchReport(len(token_ids), found[Tier.HBM], found[Tier.DRAM], found[Tier.NVME])

    def keep(self, request_id: str, hints: RequestHints, sequence: Sequence, num_prompt_tokens: int) -> None:
        """Keep the full blocks of a request's prompt; those of the session's last pin go with it."""
        if not hints.pin or hints.ttl_s is None:
            return
        name = hints.session_id or request_id
        self._release(name)
        count = min(num_prompt_tokens, sequence.num_tokens) // self._runtime.layout.block_size
        kept = None
        if count and self._num_kept() + count <= KEPT_SHARE * self._runtime.ledger.num_blocks:
            kept = self._runtime.try_keep(sequence, f"pin-{name}", count)
        if kept is None:
            self.counters.pins_refused += 1
            return
        self.counters.pins += 1
        self._kept[name] = _Kept(kept, count, self._runtime.clock() + hints.ttl_s)

    def expire(self, now: float) -> None:
        """Give up what is over. Called between steps."""
        for name in [name for name, until in self._expected.items() if now >= until]:
            del self._expected[name]
            self._runtime.prompts.forget_arrival(name)
        for name in [name for name, kept in self._kept.items() if now >= kept.until_s]:
            self._release(name)

    def release_all(self) -> None:
        """Give up everything."""
        self.expire(np.inf)

    def stats(self) -> dict[str, Any]:
        """JSON-able."""
        return {
            **asdict(self.counters),
            "expected_prompts": len(self._expected),
            "pinned_prompts": len(self._kept),
            "pinned_blocks": self._num_kept(),
        }

    def _num_kept(self) -> int:
        return sum(kept.num_blocks for kept in self._kept.values())

    def _release(self, name: str) -> None:
        kept = self._kept.pop(name, None)
        if kept is not None:
            self._runtime.close(kept.sequence)
