"""What policies are compared with where the trace as a whole, or several tiers, are needed."""

from __future__ import annotations

from dataclasses import dataclass, field

from dflash2.replay.classical.clairvoyant import fewest_writes
from dflash2.replay.classical.lru import LRU
from dflash2.replay.classical.opt import optimal_hits
from dflash2.replay.events import Arrival, Finish
from dflash2.replay.results import Movement, Outcomes
from dflash2.replay.sizes import Slots
from dflash2.types import Tier


@dataclass
class Optimal:
    """The optimum of what has been seen when it is asked; knows the future."""

    policy: str
    slots: Slots
    _arrivals: list[Arrival] = field(default_factory=list)

    def arrive(self, arrival: Arrival) -> None:
        self._arrivals.append(arrival)

    def finish(self, finish: Finish) -> None:
        """It knows already."""

    def outcomes(self) -> Outcomes:
        hits = optimal_hits([arrival.blocks for arrival in self._arrivals], self.slots[Tier.HBM])
        outcomes = Outcomes()
        for arrival, count in zip(self._arrivals, hits.tolist(), strict=True):
            outcomes.add(arrival, {Tier.HBM: count})
        return outcomes


class WriteThrough:
    """Each tier holds what the one above holds and more, all by LRU; what is computed is written to NVMe at once."""

    def __init__(self, policy: str, slots: Slots) -> None:
        self.policy = policy
        self.slots = slots
        self._tiers = {tier: LRU(size) for tier, size in slots.items() if size}
        self._outcomes = Outcomes()
        self._num_writes = 0

    def arrive(self, arrival: Arrival) -> None:
        blocks = arrival.blocks.tolist()
        hits = dict.fromkeys(self._tiers, 0)
        for block in blocks:
            tier = next((tier for tier, cache in self._tiers.items() if block in cache), None)
            if tier is None:
                break
            hits[tier] += 1
        if Tier.NVME in self._tiers:
            self._num_writes += sum(block not in self._tiers[Tier.NVME] for block in blocks)
        for block in reversed(blocks):  # a prefix loses its end before its head
            for cache in self._tiers.values():
                cache.touch(block)
        self._outcomes.add(arrival, hits)

    def finish(self, finish: Finish) -> None:
        """It does not care."""

    def outcomes(self) -> Outcomes:
        self._outcomes.movement = Movement(nvme_blocks_written=self._num_writes)
        return self._outcomes


class Clairvoyant:
    """As few writes to NVMe as give the hits of ``WriteThrough``; knows the future."""

    def __init__(self, policy: str, slots: Slots) -> None:
        self.policy = policy
        self.slots = slots
        self._equal = WriteThrough(policy, slots)
        self._arrivals: list[Arrival] = []

    def arrive(self, arrival: Arrival) -> None:
        self._arrivals.append(arrival)
        self._equal.arrive(arrival)

    def finish(self, finish: Finish) -> None:
        """It knows already."""

    def outcomes(self) -> Outcomes:
        memory = self.slots.get(Tier.HBM, 0) + self.slots.get(Tier.DRAM, 0)
        requests = [arrival.blocks for arrival in self._arrivals]
        foreseen = fewest_writes(requests, memory, self.slots.get(Tier.NVME, 0), self._equal.outcomes().num_hits)
        outcomes = Outcomes(movement=Movement(nvme_blocks_written=foreseen.num_writes))
        for arrival, above, below in zip(
            self._arrivals, foreseen.in_memory.tolist(), foreseen.on_nvme.tolist(), strict=True
        ):
            outcomes.add(arrival, {Tier.DRAM: above, Tier.NVME: below})
        return outcomes
