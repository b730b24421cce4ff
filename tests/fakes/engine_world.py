"""The reference engine over tiny tiers, with the hash model in place of a real one."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import numpy as np
from tests.fakes.cache_world import make_policy
from tests.fakes.clock import ManualClock
from tests.fakes.hash_model import VOCAB, HashRunner, answer, layout
from tests.fakes.transfer import ScriptedTransfer

from dflash2.cache.admission import Admission
from dflash2.cache.manager import CacheManager, CacheSettings
from dflash2.cache.rebalance import Rebalancer, Watermarks
from dflash2.cache.reservation import ReservationLedger
from dflash2.cache.sequence import Residency
from dflash2.cache.smoothing import ButterworthLowPass
from dflash2.config import Config
from dflash2.engine.base import FinishReason, GenerationRequest, TokenOutput
from dflash2.engine.engine import ReferenceEngine
from dflash2.engine.promises import Promises, Reserve
from dflash2.engine.recompute_scheduler import RecomputeScheduler
from dflash2.engine.sampling import SamplingParams
from dflash2.engine.scheduler import Scheduler
from dflash2.engine.scheduler_limits import SchedulerLimits
from dflash2.engine.swap_scheduler import SwapScheduler
from dflash2.policy.adaptive import AdaptiveThreshold
from dflash2.pools.base import BlockPool
from dflash2.pools.null import NullPool
from dflash2.runtime import Runtime, RuntimeParts
from dflash2.table.keys import KeyNamespace
from dflash2.table.page_table import PageTable
from dflash2.transfer.base import TransferEngine
from dflash2.types import IntArray, Tier

BLOCK = 4
NAMESPACE = KeyNamespace(model="hash", weights_version="1", dtype="float32", block_size=BLOCK)
LIMITS = SchedulerLimits(max_batch_tokens=32, max_running=64, quantum_tokens=6, admission_timeout_s=1e6)


def make_runtime(
    slots: tuple[int, int, int],
    transfer: TransferEngine,
    clock: ManualClock,
    words: np.ndarray,
    *,
    policy: str = "heat",
    pools: dict[Tier, BlockPool] | None = None,
    headroom: int = 1,
) -> Runtime:
    """As ``build`` does it, with the parts of a test.

    Args:
        slots: HBM, DRAM and NVMe slots.
        transfer: moves the words.
        clock: for every decision.
        words: uint64 ``[HBM slots, BLOCK]``.
        policy: "heat" or "lru".
        pools: closed with the runtime; by default pools without bytes.
        headroom: slots that are never promised while there are tiers below HBM.
    """
    shape = layout(BLOCK)
    sizes = dict(zip(Tier, slots, strict=True))
    if pools is None:
        pools = {tier: NullPool(tier, count, shape) for tier, count in sizes.items()}

    def copy_in_hbm(old: IntArray, new: IntArray) -> None:
        words[new] = words[old]

    settings = CacheSettings(BLOCK, shape.block_bytes, batch_blocks=4, prefetch_window=4)
    cache = CacheManager(PageTable(sizes), make_policy(policy, slots[0]), transfer, settings, copy_in_hbm)
    ledger = ReservationLedger(sum(slots) - (headroom if sum(slots[1:]) else 0), slots[0])
    rebalancer = Rebalancer(cache, Watermarks(0.9, 0.7), 0.05, AdaptiveThreshold(0.8))
    settled = {"swap_batch_size": 4, "high_watermark": 0.9, "low_watermark": 0.7, "refresh_interval_s": 0.05}
    config = Config.model_validate({"enable": True, "policy": settled})
    parts = RuntimeParts(config, shape, None, pools, transfer, cache, ledger, rebalancer, None)
    return Runtime(parts, NAMESPACE, clock)


def scripted(slots: tuple[int, int, int]) -> ScriptedTransfer:
    return ScriptedTransfer({tier: np.zeros((count, BLOCK), np.int64) for tier, count in zip(Tier, slots, strict=True)})


@dataclass
class EngineWorld:
    """An engine, the requests it was given, and what it has said so far.

    Attributes:
        slots: HBM, DRAM and NVMe slots; without lower tiers the scheduler is the one that recomputes.
        recompute: use that scheduler anyway.
        reserve: how much is reserved for a request.
    """

    slots: tuple[int, int, int]
    policy: str = "heat"
    limits: SchedulerLimits = LIMITS
    recompute: bool = False
    smoothing_cutoff: float | None = None
    """Cycles per step; None lets in whatever was reserved."""
    reserve: Reserve = "estimate"
    seed: int = 0
    copies_end: float = 1.0
    """Share of the copies in flight that end in a step."""
    step_s: float = 0.01
    max_context_tokens: int = 200
    clock: ManualClock = field(default_factory=ManualClock)
    outputs: dict[str, list[int]] = field(default_factory=dict)
    reasons: dict[str, FinishReason] = field(default_factory=dict)
    last: dict[str, TokenOutput] = field(default_factory=dict)
    first_step: dict[str, int] = field(default_factory=dict)
    """Step in which a request said its first token."""
    requests: dict[str, GenerationRequest] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.transfer = scripted(self.slots)
        words = self.transfer.memory[Tier.HBM].view(np.uint64)
        self.attach(make_runtime(self.slots, self.transfer, self.clock, words, policy=self.policy), words)
        self.rng = random.Random(self.seed)

    def attach(self, runtime: Runtime, words: np.ndarray) -> None:
        self.runtime = runtime
        self.runner = HashRunner(words)
        below = runtime.can_swap and not self.recompute
        self.scheduler: Scheduler = RecomputeScheduler(runtime, self.limits)
        if below:
            smoother = ButterworthLowPass(2, self.smoothing_cutoff) if self.smoothing_cutoff else None
            admission = Admission(runtime.cache.table.capacity(Tier.HBM), smoother)
            self.scheduler = SwapScheduler(runtime, self.limits, admission, Promises(runtime, self.reserve))
        self.engine = ReferenceEngine(
            runtime,
            self.runner,  # type: ignore[arg-type]
            self.scheduler,
            max_context_tokens=self.max_context_tokens,
            eos_token_ids=frozenset(),
            vocab_size=VOCAB,
        )

    def add(self, prompt: list[int], max_tokens: int, **more: object) -> str:
        name = f"q{len(self.requests)}"
        sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0)
        request = GenerationRequest(name, np.array(prompt, np.int32), sampling, self.clock(), **more)  # type: ignore[arg-type]
        self.engine.add(request)
        self.requests[name] = request
        self.outputs[name] = []
        return name

    def add_random(self, count: int, prompt_tokens: tuple[int, int] = (3, 30), new: tuple[int, int] = (5, 30)) -> None:
        for _ in range(count):
            prompt = [self.rng.randrange(VOCAB) for _ in range(self.rng.randint(*prompt_tokens))]
            self.add(prompt, self.rng.randint(*new))

    def step(self) -> None:
        for ticket in self.transfer.in_flight:
            if self.rng.random() < self.copies_end:
                self.transfer.end(ticket)
        for output in self.engine.step():
            name = output.request_id
            if output.token_id is not None:
                self.first_step.setdefault(name, self.runner.num_steps)
                self.outputs[name].append(output.token_id)
            if output.finish_reason is not None:
                assert name not in self.reasons, "a request ended twice"
                self.reasons[name] = output.finish_reason
                self.last[name] = output
        self.clock.advance(self.step_s)
        self.check()

    def run(self, max_steps: int) -> int:
        """Until there is no work left; returns the steps it took."""
        for count in range(max_steps):
            if not self.engine.has_work:
                return count
            self.step()
        held = {name: self.outputs[name] for name in self.requests if name not in self.reasons}
        raise AssertionError(f"not done after {max_steps} steps: {held}")

    def check(self) -> None:
        self.engine.check_integrity()
        table = self.runtime.cache.table
        assert table.num_pinned + self.runtime.cache.residency.num_promised <= table.capacity(Tier.HBM)
        for state in self.scheduler.paused:
            assert state.blocks.residency is Residency.PAUSED
        for state in self.scheduler.resident:
            assert state.blocks.residency is not Residency.PAUSED

    def check_answers(self) -> None:
        """Every request said what the reference says, whole if it was not ended early."""
        for name, request in self.requests.items():
            said = self.outputs[name]
            assert said == answer(request.token_ids.tolist(), len(said)), f"{name} read wrong KV"
            if self.reasons[name] is FinishReason.LENGTH:
                assert len(said) == request.sampling.max_tokens

    def check_all_given_back(self) -> None:
        self.transfer.end_all()
        self.engine.idle()
        self.transfer.end_all()
        self.engine.idle()
        self.check()
        runtime = self.runtime
        table = runtime.cache.table
        assert not self.scheduler.every() and not self.engine.has_work
        assert runtime.ledger.num_promised == 0 and runtime.cache.residency.num_promised == 0
        assert not table.ref_count.any() and not table.pin_count.any()
        runtime.flush()
        self.transfer.end_all()
        runtime.poll()
        assert all(table.num_used(tier) == 0 for tier in Tier)
