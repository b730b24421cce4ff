"""What can be replayed, by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from dflash2.config import Config
from dflash2.errors import RequestError
from dflash2.replay.classical.arc import ARC
from dflash2.replay.classical.base import ClassicalCache
from dflash2.replay.classical.fifo import FIFO
from dflash2.replay.classical.lfu import LFU
from dflash2.replay.classical.lru import LRU
from dflash2.replay.classical.s3fifo import S3FIFO
from dflash2.replay.classical.wtinylfu import WTinyLFU
from dflash2.replay.device import DeviceModel
from dflash2.replay.events import Arrival, Finish
from dflash2.replay.managed import BlockNames, BlockSize, ManagedCache
from dflash2.replay.reference import Clairvoyant, Optimal, WriteThrough
from dflash2.replay.results import Movement, Outcomes
from dflash2.replay.sizes import Slots, is_single
from dflash2.types import Tier

ASSUMED = DeviceModel()
TAIL = "-tail"
"""Suffix: a request's last block is touched first, so that a prefix loses its end before its head."""
OPT = "opt"
CLASSICAL: Mapping[str, Callable[[int], ClassicalCache]] = {
    "lru": LRU,
    "fifo": FIFO,
    "lfu": LFU,
    "s3-fifo": S3FIFO,
    "arc": ARC,
    "w-tinylfu": WTinyLFU,
}
PRODUCT = {"heat": "heat", "lru-tail": "lru"}
"""Names for a single tier of what a server runs with, and its ``policy.eviction``."""


class Replayed(Protocol):
    """One policy at one size, fed with the events of a trace."""

    policy: str
    slots: Slots

    def arrive(self, arrival: Arrival) -> None: ...

    def finish(self, finish: Finish) -> None: ...

    def outcomes(self) -> Outcomes:
        """What came of it so far."""
        ...


@dataclass
class Managed:
    """The product's own code; see ``ManagedCache``."""

    policy: str
    slots: Slots
    cache: ManagedCache
    _outcomes: Outcomes = field(default_factory=Outcomes)

    def arrive(self, arrival: Arrival) -> None:
        self._outcomes.add(arrival, self.cache.arrive(arrival))

    def finish(self, finish: Finish) -> None:
        self.cache.finish(finish)

    def outcomes(self) -> Outcomes:
        self.cache.drain()
        counters = self.cache.cache.counters
        self._outcomes.movement = Movement(
            bytes_in=counters.swap_in_bytes,
            bytes_out=counters.swap_out_bytes,
            nvme_blocks_written=counters.demoted_to_nvme_blocks,
            nvme_blocks_read=counters.loaded_from_nvme_blocks,
            prefetched=counters.prefetch_issued_blocks,
            prefetched_used=counters.prefetch_used_blocks,
            awaited_from_nvme=self.cache.num_awaited,
            brought_near=self.cache.num_brought_near,
        )
        self._outcomes.calibration = self.cache.sampler.bins()
        return self._outcomes


@dataclass
class Classical:
    """A policy from the literature, block by block."""

    policy: str
    slots: Slots
    cache: ClassicalCache
    last_first: bool
    _outcomes: Outcomes = field(default_factory=Outcomes)

    def arrive(self, arrival: Arrival) -> None:
        blocks = arrival.blocks.tolist()
        hits = 0
        for block in blocks:
            if block not in self.cache:
                break
            hits += 1
        for block in reversed(blocks) if self.last_first else blocks:
            self.cache.touch(block)
        self._outcomes.add(arrival, {Tier.HBM: hits})

    def finish(self, finish: Finish) -> None:
        """It does not care."""

    def outcomes(self) -> Outcomes:
        return self._outcomes


SEVERAL_TIERS: Mapping[str, Callable[[str, Slots], Replayed]] = {
    "write-through": WriteThrough,
    "clairvoyant": Clairvoyant,
}
"""What writes to NVMe are compared with."""


def policy_names(single_tier: bool) -> list[str]:
    """Names that ``make_replayed`` knows."""
    if not single_tier:
        return ["heat", "lru", *SEVERAL_TIERS]
    return ["heat", *CLASSICAL, *(name + TAIL for name in CLASSICAL), OPT]


def make_replayed(
    name: str, slots: Slots, config: Config, block: BlockSize, names: BlockNames, device: DeviceModel = ASSUMED
) -> Replayed:
    """A policy at one size.

    Args:
        name: one of ``policy_names``.
        slots: blocks of each tier.
        config: everything else.
        block: size of a block.
        names: shared by all that are replayed together.
        device: speeds of the machine.

    Raises:
        RequestError: there is no such policy; those there are are listed.
    """
    single = is_single(slots)
    known = policy_names(single)
    if name not in known:
        tiers = "one tier" if single else "several tiers"
        raise RequestError(f"there is no policy {name!r} for {tiers}; choose from {', '.join(known)}", "--policy")
    if not single and name in SEVERAL_TIERS:
        return SEVERAL_TIERS[name](name, slots)
    if name in PRODUCT or not single:
        eviction = PRODUCT.get(name, name)
        chosen = config.model_copy(
            update={"enable": True, "policy": config.policy.model_copy(update={"eviction": eviction})}
        )
        return Managed(name, slots, ManagedCache(chosen, slots, block, names, device))
    if name == OPT:
        return Optimal(name, slots)
    make = CLASSICAL[name.removesuffix(TAIL)]
    return Classical(name, slots, make(slots[Tier.HBM]), name.endswith(TAIL))
