"""A real runtime with tiny tiers under traffic of its own, driven by a thread; no model."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from dflash2 import Config, KeyNamespace, KVLayout, Runtime, create_runtime
from dflash2.cache.sequence import Sequence
from dflash2.monitoring.latency import RequestLatencies

LAYOUT = KVLayout(num_layers=2, num_kv_heads=2, head_dim=32, block_size=16, dtype="float32")  # 16 KiB a block
SPACE = KeyNamespace("m", "w1", "float32", 16)
STEP_S = 0.002


def live_config(path: Path, **more: Any) -> Config:
    memory = {"hbm_capacity_mb": 1, "dram_capacity_mb": 1, "nvme_capacity_mb": 4, "staging_buffer_size_mb": 1}
    values = {"enable": True, "memory": {**memory, "nvme_path": str(path)}, "kv_block": {"block_size": 16}}
    return Config.model_validate({**values, "policy": {"refresh_interval_s": 0.2, "swap_batch_size": 8}, **more})


@dataclass
class Live:
    """Conversations that take turns in HBM, for as long as ``paused`` is not set."""

    runtime: Runtime
    seed: int = 0
    paused: threading.Event = field(default_factory=threading.Event)
    """Set it and wait for ``is_still``: from then on no figure changes."""
    stopping: threading.Event = field(default_factory=threading.Event)
    failure: BaseException | None = None
    is_still: bool = False
    num_turns: int = 0

    def __post_init__(self) -> None:
        self._rng = random.Random(self.seed)
        self._latencies = RequestLatencies()
        self._chats: dict[int, np.ndarray] = {}
        self.runtime.stats_of["latency"] = self._latencies.as_dict
        self.runtime.stats_of["scheduler"] = lambda: {"admitted_requests": self.num_turns, "paused_requests": 3}
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self.stopping.set()
        self._thread.join(60)
        self.runtime.shutdown()
        if self.failure is not None:
            raise self.failure

    def until(self, condition: Callable[[], bool]) -> None:
        for _ in range(6_000):
            if self.failure is not None:
                raise self.failure
            if condition():
                return
            time.sleep(0.01)
        raise AssertionError("it never came true")

    def hold_still(self) -> None:
        """Stop the traffic and wait for the copies in flight."""
        self.paused.set()
        self.until(lambda: self.is_still)

    def _run(self) -> None:
        try:
            while not self.stopping.is_set():
                if self.paused.is_set():
                    self.runtime.poll()
                    self.runtime.observer.step(self.runtime)
                    self.is_still = not self.runtime.cache.mover.num_in_flight
                    time.sleep(STEP_S)
                else:
                    self._turn()
        except BaseException as error:  # noqa: BLE001 - raised again by close()
            self.failure = error

    def _turn(self) -> None:
        """One turn of a conversation: two in three continue an old one."""
        began = time.monotonic()
        chat = self._rng.choice([*self._chats, len(self._chats) % 12]) if self._chats else 0
        prompt = self._chats.get(chat, np.empty(0, np.int32))
        new = np.array([self._rng.randrange(1000) for _ in range(self._rng.randrange(40, 120))], np.int32)
        prompt = np.concatenate([prompt, new]) if len(prompt) < 400 else new
        self._chats[chat] = prompt
        name = f"r{self.num_turns}"
        sequence = self.runtime.open(name, prompt, 8)
        assert sequence is not None
        self._latencies.on_arrival(name, began)
        self._latencies.on_step([name], time.monotonic())
        self._compute(sequence, prompt[sequence.num_tokens :])
        for token in range(8):
            self._latencies.on_token(name, 0, time.monotonic())
            self._compute(sequence, np.array([token], np.int32))
        self._latencies.on_branch_end(name, 0, time.monotonic())
        self._latencies.on_end(name)
        self.runtime.close(sequence)
        self.num_turns += 1

    def _compute(self, sequence: Sequence, new: np.ndarray) -> None:
        work = [(sequence, new)]
        self.runtime.prepare_step([(sequence, len(new))])
        self.runtime.complete_step(work)
        self.runtime.rebalance([], [])
        time.sleep(STEP_S)


@contextmanager
def living(path: Path, **more: Any) -> Iterator[Live]:
    live = Live(create_runtime(live_config(path, **more), LAYOUT, SPACE))
    try:
        yield live
    finally:
        live.close()
