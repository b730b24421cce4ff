"""The pitfalls that a running system can see: for each, when it is one, and the words that teach the way out.

Each rule looks at what happened since it last had enough to judge, and returns a message with the measured figure and
the key to change, or None.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from dflash2.config import Config
from dflash2.config.schema import KVBlockConfig, MemoryConfig
from dflash2.monitoring.numbers_in import number_at
from dflash2.types import MIB

MIN_USES = 256
"""Uses of blocks before a hit rate means anything."""
WEAK_HIT_RATE, BAD_HIT_RATE = 0.98, 0.95
MIN_DEMOTED = 64
MAX_REGRET = 0.3
MIN_PREFETCHED = 64
MAX_WASTED = 0.3
STAGING_SLACK = 2
MIN_HEADROOM = 0.05
MAX_FRAGMENTS = 0.1
MIN_FRAGMENT_BYTES = 512 * MIB
MIN_SHM_BYTES = 1024 * MIB
_DEFAULT_STAGING_MB: int = MemoryConfig().staging_buffer_size_mb
_DEFAULT_WINDOW: int = KVBlockConfig().prefetch_window

Worst: TypeAlias = Callable[[], list[tuple[int, int]]]


@dataclass(slots=True)
class Seen:
    """What a rule may look at.

    Attributes:
        stats: as ``Runtime.stats`` returns them.
        config: what is in effect.
        worst: gives (block_id, misses) of the blocks that missed most, the worst first; takes a while.
    """

    stats: Mapping[str, Any]
    config: Config
    worst: Worst = list
    _before: dict[tuple[str, tuple[str, ...]], float] = field(default_factory=dict)

    def at(self, *path: str) -> float:
        """The number there."""
        return number_at(self.stats, path)

    def grown(self, rule: str, *path: str) -> float:
        """By how much the number has grown since the rule's last verdict."""
        return self.at(*path) - self._before.get((rule, path), 0.0)

    def judged(self, rule: str, *paths: tuple[str, ...]) -> None:
        """The rule has come to a verdict: it counts from here on."""
        self._before.update({(rule, path): self.at(*path) for path in paths})

    def next(self, stats: Mapping[str, Any], config: Config, worst: Worst) -> Seen:
        """What is seen next, with the memory of what was judged."""
        return Seen(stats, config, worst, self._before)


Rule: TypeAlias = Callable[[Seen], str | None]

_USES, _HITS = ("counters", "used_blocks"), ("counters", "used_in_hbm_blocks")
_DEMOTED, _REGRETTED = ("regret", "demoted_blocks"), ("regret", "regretted_blocks")
_USED, _WASTED = ("counters", "prefetch_used_blocks"), ("counters", "prefetch_wasted_blocks")
_STORED, _STORE_S = ("transfer", "nvme_stores", "jobs"), ("transfer", "nvme_stores", "latency_sum_s")


def hbm_hit_rate(seen: Seen) -> str | None:
    """Blocks are often not in HBM when they are needed (R-3.6)."""
    rule = "hbm-hit-rate"
    uses = seen.grown(rule, *_USES)
    if uses < MIN_USES:
        return None
    misses = uses - seen.grown(rule, *_HITS)
    seen.judged(rule, _USES, _HITS)
    rate = 1.0 - misses / uses
    if rate >= WEAK_HIT_RATE:
        return None
    found = f"hbm_hit_rate was {rate:.1%} over the last {uses:.0f} uses of blocks, {misses:.0f} were not in HBM in time"
    worst = seen.worst()[:3]
    if worst:
        again = ", ".join(f"{block_id} ({count})" for block_id, count in worst)
        found += f"; most often block {again}"
    if rate < BAD_HIT_RATE:
        return (
            f"{found}. Lower concurrency (scheduling.max_running, now {seen.config.scheduling.max_running}) or give "
            "HBM more room (memory.hbm_reserve_mb, memory.hbm_capacity_mb)"
        )
    threshold = seen.config.policy.cold_threshold
    return f"{found}. Look at policy.cold_threshold ({threshold}) before adding concurrency"


def staging_size(seen: Seen) -> str | None:
    """Staging is larger than it can be used (R-7.1)."""
    asked = seen.config.memory.staging_buffer_size_mb
    usable = -(-int(seen.at("transfer", "staging_bytes")) // MIB)
    peak = seen.at("transfer", "staging_peak_bytes")
    if asked <= _DEFAULT_STAGING_MB or not peak or asked <= STAGING_SLACK * usable:
        return None
    return (
        f"memory.staging_buffer_size_mb is {asked}, of which {usable} MiB can be used (peak so far "
        f"{peak / MIB:.1f} MiB); a larger one raises the peak of memory, not the speed: write {usable}"
    )


def prefetch_window(seen: Seen) -> str | None:
    """A wide window fetches what nobody uses (R-7.1)."""
    rule, window = "prefetch-window", seen.config.kv_block.prefetch_window
    wasted = seen.grown(rule, *_WASTED)
    fetched = wasted + seen.grown(rule, *_USED)
    if window <= _DEFAULT_WINDOW or fetched < MIN_PREFETCHED:
        return None
    seen.judged(rule, _USED, _WASTED)
    if wasted <= MAX_WASTED * fetched:
        return None
    return (
        f"{wasted / fetched:.0%} of {fetched:.0f} prefetched blocks were given up unused with kv_block.prefetch_window "
        f"{window}: write {_DEFAULT_WINDOW}, it widens by itself while that pays"
    )


def nvme_slow(seen: Seen) -> str | None:
    """NVMe takes stores much slower than it did: its write cache is full (R-7.2)."""
    rule = "nvme-slow"
    stored, took_s = seen.grown(rule, *_STORED), seen.grown(rule, *_STORE_S)
    if not seen.at("transfer", "pressed"):
        seen.judged(rule, _STORED, _STORE_S)
        return None
    mean = f"{1000 * took_s / stored:.0f} ms a copy, {stored:.0f} copies" if stored else "no copy ended"
    return (
        f"NVMe takes stores much slower than it usually does ({mean}): its write cache may be full. Stores are paced "
        f"and yield to loads; if TTFT jumps lower policy.swap_batch_size ({seen.config.policy.swap_batch_size}), and "
        "measure the disk with `dflash2 doctor --probe`"
    )


def fragmentation(seen: Seen) -> str | None:
    """The framework's allocator holds memory in pieces that it cannot give to anybody (R-7.3)."""
    reserved, used = seen.at("allocator", "reserved_bytes"), seen.at("allocator", "allocated_bytes")
    lost = reserved - used
    if lost < MIN_FRAGMENT_BYTES or lost <= MAX_FRAGMENTS * reserved:
        return None
    return (
        f"PyTorch's allocator holds {reserved / 1e9:.1f} GB of the device, of which {lost / 1e9:.1f} GB are not in "
        "use: create the runtime before the weights are loaded, set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True; "
        f"memory.hbm_reserve_mb ({seen.config.memory.hbm_reserve_mb}) must cover what remains"
    )


def threshold_too_high(seen: Seen) -> str | None:
    """Blocks are demoted that are needed at once (R-7.4)."""
    rule, policy = "cold-threshold", seen.config.policy
    demoted = seen.grown(rule, *_DEMOTED)
    if demoted < MIN_DEMOTED:
        return None
    regret = seen.grown(rule, *_REGRETTED) / demoted
    seen.judged(rule, _DEMOTED, _REGRETTED)
    if regret <= MAX_REGRET:
        return None
    effective = seen.at("effective_threshold")
    guard = (
        "policy.adaptive is off: turn it on"
        if not policy.adaptive
        else f"the adaptive guard goes by {effective:.2f} meanwhile"
        if effective < policy.cold_threshold
        else "the adaptive guard has not moved yet"
    )
    return (
        f"{regret:.0%} of {demoted:.0f} blocks demoted ahead of need came back soon: policy.cold_threshold "
        f"{policy.cold_threshold} is too high for this traffic ({guard}); lower it"
    )


def memory_headroom(seen: Seen) -> str | None:
    """So much memory is given to DRAM that the page cache starves (R-7.5)."""
    limit, left = seen.at("host", "memory_limit_bytes"), seen.at("host", "headroom_bytes")
    if not limit or left >= MIN_HEADROOM * limit:
        return None
    dram_mb = int(seen.at("tiers", "dram", "pool_bytes")) // MIB
    return (
        f"{left / 1e9:.1f} GB are left of the {limit / 1e9:.1f} GB that this process may use, so the page cache "
        f"starves and reads wait for the disk: lower memory.dram_capacity_mb (this rank holds {dram_mb}) or raise the "
        "limit"
    )


def shared_memory(seen: Seen) -> str | None:
    """Worker processes on devices exchange data through /dev/shm (R-7.6)."""
    size = seen.at("host", "shm_bytes")
    if not size or size >= MIN_SHM_BYTES or not seen.stats.get("has_device"):
        return None
    return (
        f"/dev/shm has {size / MIB:.0f} MiB; DFlash2 needs none, but NCCL and the engine's workers do: start the "
        "container with --shm-size=8g"
    )


RULES: Mapping[str, Rule] = {
    "hbm-hit-rate": hbm_hit_rate,
    "staging-size": staging_size,
    "prefetch-window": prefetch_window,
    "nvme-slow": nvme_slow,
    "fragmentation": fragmentation,
    "cold-threshold": threshold_too_high,
    "memory-headroom": memory_headroom,
    "shared-memory": shared_memory,
}
"""By id. Relative paths (R-7.7) never get this far: the configuration refuses them."""
