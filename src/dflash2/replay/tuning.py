"""Searches settings on recorded traffic, within what the user can give; needs optuna, of the extra ``replay``."""

from __future__ import annotations

import importlib.util
import multiprocessing
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from dflash2.config import Config
from dflash2.errors import RequestError
from dflash2.replay.caches import make_replayed
from dflash2.replay.device import DeviceModel
from dflash2.replay.events import Event
from dflash2.replay.managed import BlockNames, BlockSize
from dflash2.replay.run import replay
from dflash2.replay.sizes import slots_of_config

if TYPE_CHECKING:
    import optuna

LOWEST_THRESHOLD = 0.3
HIGHEST_THRESHOLD = 0.99
WINDOWS = (4, 8)
BATCHES = (8, 16, 32, 64, 128)
CAPACITY_STEP = 0.25
"""DRAM and NVMe are tried in quarters of what there is."""
NEAR = 1.01
"""A modelled TTFT within this factor of the best counts as equally good."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What settings gave on the trace.

    Attributes:
        config: the settings.
        hit_ratio: leading blocks found at arrival over all blocks of all prompts.
        nvme_bytes_per_hour: written, per hour of the trace.
        ttft_mean_s: modelled, without waiting for other requests.
        ttft_p99_s: modelled, likewise.
    """

    config: Config
    hit_ratio: float
    nvme_bytes_per_hour: float
    ttft_mean_s: float
    ttft_p99_s: float

    @property
    def figures(self) -> tuple[float, float, float]:
        return (self.hit_ratio, self.nvme_bytes_per_hour, self.ttft_mean_s)


class Traffic:
    """A trace in memory, replayed as often as need be.

    Args:
        events: of the whole trace.
        block: size of a block.
        ranks: that share DRAM and NVMe.
        device: speeds, for the modelled TTFT.
    """

    def __init__(self, events: Sequence[Event], block: BlockSize, ranks: int, device: DeviceModel) -> None:
        self._events = events
        self._block = block
        self._ranks = ranks
        self._device = device
        self._names = BlockNames()
        self._hours = max(events[-1].at_s, 1.0) / 3600

    def try_out(self, config: Config) -> Outcome:
        """Replay the traffic with these settings."""
        slots = slots_of_config(config, self._ranks, self._block.num_bytes)
        cache = make_replayed(config.policy.eviction, slots, config, self._block, self._names, self._device)
        replay(self._events, (cache,))
        outcomes = cache.outcomes()
        ttft = np.array(outcomes.ttft_s(self._device, self._block.num_bytes))
        written = outcomes.movement.nvme_blocks_written * self._block.num_bytes
        return Outcome(
            config=config,
            hit_ratio=outcomes.prefix_hit_ratio,
            nvme_bytes_per_hour=written / self._hours,
            ttft_mean_s=float(ttft.mean()),
            ttft_p99_s=float(np.percentile(ttft, 99)),
        )


def check_tuning() -> None:
    """Raises:
    RequestError: optuna is not installed.
    """
    if importlib.util.find_spec("optuna") is None:
        raise RequestError("tuning needs optuna; pip install 'dflash2[replay]'")


def search(
    try_out: Callable[[Config], Outcome],
    base: Config,
    num_trials: int,
    on_trial: Callable[[], None] = lambda: None,
    *,
    seed: int = 0,
    jobs: int = 1,
) -> list[Outcome]:
    """Try settings, the base first, then what the optimiser proposes after what it has seen.

    Args:
        try_out: replays with a configuration; with more than one job it is sent to other processes.
        base: its capacities are the budget; all other settings stay as they are.
        num_trials: how many to try, the base included.
        on_trial: called after each.
        seed: of the optimiser; the same seed and number of jobs give the same search.
        jobs: trials at the same time.

    Returns:
        One outcome for each trial; the first is that of ``base``.
    """
    import optuna

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    study = optuna.create_study(
        directions=["maximize", "minimize", "minimize"], sampler=optuna.samplers.TPESampler(seed=seed)
    )
    study.enqueue_trial(_start(base))
    outcomes: list[Outcome] = []
    with _workers(jobs) as run_all:
        while len(outcomes) < num_trials:
            trials = [study.ask() for _ in range(min(jobs, num_trials - len(outcomes)))]
            configs = [_propose(trial, base) for trial in trials]
            for trial, outcome in zip(trials, run_all(try_out, configs), strict=True):
                study.tell(trial, outcome.figures)
                outcomes.append(outcome)
                on_trial()
    return outcomes


@contextmanager
def _workers(jobs: int) -> Iterator[Callable[..., Iterable[Outcome]]]:
    if jobs == 1:
        yield map
        return
    # Not forked: this process may have threads.
    with ProcessPoolExecutor(jobs, mp_context=multiprocessing.get_context("spawn")) as pool:
        yield pool.map


def best_of(outcomes: Sequence[Outcome], max_nvme_bytes_per_hour: float | None = None) -> Outcome:
    """The settings to use: shortest mean TTFT; of those near it, the fewest writes; of equals, the one tried first.

    Args:
        outcomes: at least one.
        max_nvme_bytes_per_hour: what the disk may be given; where nothing keeps to it, the fewest writes win.
    """
    allowed = [
        one for one in outcomes if max_nvme_bytes_per_hour is None or one.nvme_bytes_per_hour <= max_nvme_bytes_per_hour
    ]
    if not allowed:
        return min(outcomes, key=lambda one: one.nvme_bytes_per_hour)
    limit = NEAR * min(one.ttft_mean_s for one in allowed)
    return min((one for one in allowed if one.ttft_mean_s <= limit), key=lambda one: one.nvme_bytes_per_hour)


def trade_off(outcomes: Sequence[Outcome]) -> list[Outcome]:
    """Outcomes than which no other is at least as good in everything; each once, by rising TTFT."""
    distinct: dict[tuple[float, float, float], Outcome] = {}
    for one in outcomes:
        distinct.setdefault(one.figures, one)
    kept = [one for one in distinct.values() if not any(_beats(other, one) for other in distinct.values())]
    return sorted(kept, key=lambda one: one.ttft_mean_s)


def _beats(other: Outcome, one: Outcome) -> bool:
    return other.figures != one.figures and (
        other.hit_ratio >= one.hit_ratio
        and other.nvme_bytes_per_hour <= one.nvme_bytes_per_hour
        and other.ttft_mean_s <= one.ttft_mean_s
    )


def _start(base: Config) -> dict[str, Any]:
    """The base as the optimiser's first proposal."""
    return {
        "cold_threshold": base.policy.cold_threshold,
        "prefetch_window": base.kv_block.prefetch_window,
        "swap_batch_size": base.policy.swap_batch_size,
        "dram": 1.0,
        "nvme": 1.0,
    }


def _propose(trial: optuna.Trial, base: Config) -> Config:
    memory, policy = base.memory, base.policy
    lowest, highest = (
        min(LOWEST_THRESHOLD, policy.cold_threshold),
        max(HIGHEST_THRESHOLD, policy.cold_threshold),
    )
    document = base.model_dump(exclude_unset=True)
    chosen_policy = document.setdefault("policy", {})
    chosen_policy["cold_threshold"] = round(trial.suggest_float("cold_threshold", lowest, highest), 2)
    batches = sorted({*BATCHES, policy.swap_batch_size})
    chosen_policy["swap_batch_size"] = trial.suggest_categorical("swap_batch_size", batches)
    window = trial.suggest_int("prefetch_window", *WINDOWS)
    document.setdefault("kv_block", {})["prefetch_window"] = window
    if memory.dram_capacity_mb:
        share = trial.suggest_float("dram", CAPACITY_STEP, 1.0, step=CAPACITY_STEP)
        document["memory"]["dram_capacity_mb"] = int(share * memory.dram_capacity_mb)
    if memory.nvme_capacity_mb:
        share = trial.suggest_float("nvme", 0.0, 1.0, step=CAPACITY_STEP)
        document["memory"]["nvme_capacity_mb"] = int(share * memory.nvme_capacity_mb)
    return Config.model_validate(document)
