"""A burst of requests on the real scheduler and manager: no bytes, a model that only takes time, a clock by hand."""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from tests.fakes.clock import ManualClock

from dflash2.cache.admission import Admission
from dflash2.cache.manager import CacheManager, CacheSettings
from dflash2.cache.rebalance import Rebalancer, Watermarks
from dflash2.cache.reservation import ReservationLedger
from dflash2.cache.smoothing import ButterworthLowPass
from dflash2.config import Config, SchedulingConfig
from dflash2.engine.base import FinishReason, GenerationRequest
from dflash2.engine.batch import StepBatch
from dflash2.engine.engine import ReferenceEngine
from dflash2.engine.promises import Promises, Reserve
from dflash2.engine.sampling import SamplingParams
from dflash2.engine.scheduler_limits import SchedulerLimits
from dflash2.engine.swap_scheduler import SwapScheduler
from dflash2.policy.adaptive import AdaptiveThreshold
from dflash2.policy.heat import HeatPolicy
from dflash2.pools.base import BlockPool
from dflash2.pools.null import NullPool
from dflash2.runtime import Runtime, RuntimeParts
from dflash2.table.keys import KeyNamespace
from dflash2.table.page_table import PageTable
from dflash2.transfer.base import Completion, CopyJob
from dflash2.types import KVLayout, Tier

BLOCK = 32
LAYOUT = KVLayout(num_layers=80, num_kv_heads=8, head_dim=128, block_size=BLOCK, dtype="bfloat16")
"""A 72B model's KV on one rank: 10 MiB a block."""
VOCAB = 4
DEFAULTS = SchedulingConfig()
BYTES_PER_S = 20e9
"""Each way, as PCIe 4 x16 gives."""


class TimedTransfer:
    """Copies take the time of their bytes, one after the other in each direction."""

    is_pressed = False

    def __init__(self, clock: ManualClock) -> None:
        self._clock = clock
        self._free_at = {True: 0.0, False: 0.0}
        self._flights: dict[int, tuple[float, CopyJob]] = {}
        self._next_ticket = 1

    def submit(self, job: CopyJob) -> int:
        inwards = job.dst < job.src
        begin = max(self._clock(), self._free_at[inwards])
        end = begin + len(job.src_slots) * LAYOUT.block_bytes / BYTES_PER_S
        self._free_at[inwards] = end
        ticket = self._next_ticket
        self._next_ticket += 1
        self._flights[ticket] = (end, job)
        return ticket

    def poll(self) -> list[Completion]:
        over = sorted((end, ticket) for ticket, (end, _) in self._flights.items() if end <= self._clock())
        done = []
        for _, ticket in over:
            _, job = self._flights.pop(ticket)
            good = np.ones(len(job.src_slots), np.bool_)
            done.append(Completion(ticket, job, good, ~good, 0.0))
        return done

    def wait(self, tickets: list[int], timeout_s: float) -> bool:
        last = max((self._flights[ticket][0] for ticket in tickets if ticket in self._flights), default=self._clock())
        self._clock.now = max(self._clock(), min(last, self._clock() + timeout_s))
        return last <= self._clock()

    def cancel(self, ticket: int) -> bool:
        return False

    def close(self, timeout_s: float) -> None:
        self._flights.clear()

    def check_integrity(self) -> None:
        pass


class TimedRunner:
    """A model that reads its weights once a step, computes its tokens and reads the context; it says nothing."""

    def __init__(self, clock: ManualClock) -> None:
        self._clock = clock
        self.num_steps = 0

    def run(self, batch: StepBatch) -> torch.Tensor:
        self.num_steps += 1
        self._clock.advance(0.025 + 6e-5 * len(batch.token_ids) + 3e-7 * float(batch.context_lens.sum()))
        return torch.zeros(int(batch.wants_logits.sum()), VOCAB)


@dataclass(frozen=True)
class Case:
    """What is compared."""

    smoothing: bool = True
    cutoff: float = DEFAULTS.smoothing_cutoff
    short_first: bool = True
    reserve: Reserve = "estimate"
    oversubscription: float = 4.0
    timeout_s: float = 1e6
    spread_s: float = 0.0
    """Time over which the requests arrive; 0 for all at once."""


@dataclass
class Outcome:
    """What came of a burst."""

    makespan_s: float
    ttft_s: dict[str, float]
    finished_s: dict[str, float]
    size: dict[str, int]
    num_tokens: int
    reasons: set[FinishReason]
    stats: dict[str, Any]
    num_steps: int
    gap_s: dict[str, float] = field(default_factory=dict)
    """Longest time between two tokens of a request."""

    @property
    def swap_bytes(self) -> int:
        counters = self.stats["counters"]
        return int(counters["swap_in_bytes"] + counters["swap_out_bytes"])

    def ttft_of_short(self, num_tokens: int = 200) -> float:
        """99th percentile, of requests below ``num_tokens``."""
        return float(np.quantile([self.ttft_s[name] for name, size in self.size.items() if size < num_tokens], 0.99))

    @property
    def longest(self) -> str:
        return max(self.size, key=lambda name: self.size[name])


def burst_lengths(seed: int, count: int = 64) -> list[tuple[int, int]]:
    """(prompt, answer) tokens: 50 to 6,000 together, evenly over the orders of magnitude, both ends present."""
    rng = random.Random(seed)
    totals = [50, 6000, *(round(50 * 120 ** rng.random()) for _ in range(count - 2))]
    rng.shuffle(totals)
    answers = [max(8, round(total * rng.uniform(0.05, 0.2))) for total in totals]
    return [(total - answer, answer) for total, answer in zip(totals, answers, strict=True)]


def run_burst(lengths: list[tuple[int, int]], case: Case, max_steps: int = 50_000) -> Outcome:
    """All requests at once, until the last has ended."""
    clock = ManualClock()
    blocks = [LAYOUT.num_blocks(prompt + answer) for prompt, answer in lengths]
    hbm = max(max(blocks), int(sum(blocks) / case.oversubscription))
    sizes = {Tier.HBM: hbm, Tier.DRAM: 2 * sum(blocks), Tier.NVME: 0}
    settings = CacheSettings(BLOCK, LAYOUT.block_bytes, batch_blocks=32, prefetch_window=4)
    transfer = TimedTransfer(clock)
    table = PageTable(sizes)
    cache = CacheManager(table, HeatPolicy(hbm, 0.8), transfer, settings, lambda old, new: None)
    rebalancer = Rebalancer(cache, Watermarks(0.95, 0.90), 1.0, AdaptiveThreshold(0.8))
    pools: dict[Tier, BlockPool] = {tier: NullPool(tier, count, LAYOUT) for tier, count in sizes.items()}
    ledger = ReservationLedger(sum(sizes.values()), hbm)
    parts = RuntimeParts(Config(enable=True), LAYOUT, None, pools, transfer, cache, ledger, rebalancer, None)
    runtime = Runtime(parts, KeyNamespace("null", "1", "bfloat16", BLOCK), clock)
    limits = SchedulerLimits(2048, 256, 32, case.timeout_s, short_first=case.short_first)
    smoother = ButterworthLowPass(DEFAULTS.smoothing_order, case.cutoff) if case.smoothing else None
    scheduler = SwapScheduler(runtime, limits, Admission(hbm, smoother), Promises(runtime, case.reserve))
    runner = TimedRunner(clock)
    engine = ReferenceEngine(
        runtime,
        runner,  # type: ignore[arg-type]
        scheduler,
        max_context_tokens=8192,
        eos_token_ids=frozenset(),
        vocab_size=VOCAB,
    )
    rng = np.random.default_rng(0)
    start = clock()
    todo: deque[GenerationRequest] = deque()
    size = {}
    for number, (prompt, answer) in enumerate(lengths):
        name = f"q{number}"
        size[name] = prompt + answer
        tokens = rng.integers(0, VOCAB, prompt).astype(np.int32)
        arrives = start + case.spread_s * number / len(lengths)
        todo.append(GenerationRequest(name, tokens, SamplingParams(max_tokens=answer, temperature=0.0), arrives))
    arrival = {request.request_id: request.arrival_s for request in todo}
    ttft: dict[str, float] = {}
    said_s: dict[str, float] = {}
    gap_s: dict[str, float] = {}
    finished: dict[str, float] = {}
    reasons = set()
    num_tokens = 0
    for _ in range(max_steps):
        if not engine.has_work and not todo:
            break
        while todo and todo[0].arrival_s <= clock():
            engine.add(todo.popleft())
        if not engine.has_work:
            clock.now = todo[0].arrival_s
            continue
        for output in engine.step():
            num_tokens += output.token_id is not None
            ttft.setdefault(output.request_id, clock() - arrival[output.request_id])
            gap = clock() - said_s.get(output.request_id, clock())
            gap_s[output.request_id] = max(gap, gap_s.get(output.request_id, 0.0))
            said_s[output.request_id] = clock()
            if output.finish_reason is not None:
                finished[output.request_id] = clock() - start
                reasons.add(output.finish_reason)
    assert not engine.has_work and not todo, "the burst does not end"
    engine.check_integrity()
    return Outcome(clock() - start, ttft, finished, size, num_tokens, reasons, engine.stats(), runner.num_steps, gap_s)


def first_come(case: Case) -> Case:
    """The same without any regard for length."""
    return replace(case, short_first=False)
