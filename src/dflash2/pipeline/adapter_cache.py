"""Adapter weights over the tiers: disk, DRAM within a budget, and a fixed number of slots on the device.

They never change, so a copy on a slower tier is always clean and giving one up costs nothing. Disk to DRAM and DRAM to
device are done by a loader in the background; nothing here waits.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from enum import Enum
from typing import Any, Protocol

from dflash2.errors import IntegrityError, ModelError
from dflash2.pipeline.adapter_file import AdapterSpec, AdapterWeights

MEMORY_S = 60.0
"""Time over which uses are averaged, and the horizon of heat."""


class Work(Enum):
    """What a loader does."""

    READ = "read"
    """Disk to DRAM."""
    FILL = "fill"
    """DRAM to a slot on the device."""


@dataclass(frozen=True, slots=True)
class Loaded:
    """A loader's work that has ended: ``weights`` after a READ that went well, ``error`` if it went wrong."""

    digest: str
    work: Work
    weights: AdapterWeights | None = None
    error: Exception | None = None


class AdapterLoader(Protocol):
    """Moves weights in the background."""

    def read(self, spec: AdapterSpec) -> None:
        """Begin to read an adapter from disk."""

    def fill(self, spec: AdapterSpec, weights: AdapterWeights, slot: int) -> None:
        """Begin to copy weights to a slot that no step uses."""

    def poll(self) -> Iterable[Loaded]:
        """What has ended since the last call."""

    def close(self, timeout_s: float) -> None:
        """Stop. What hangs in a file system is left behind after the deadline. Idempotent."""


@dataclass(slots=True)
class AdapterCounters:
    """What was done since the start."""

    uses: int = 0
    uses_on_device: int = 0
    """Uses by requests that found the adapter on the device."""
    reads: int = 0
    fills: int = 0
    evictions: int = 0
    """Adapters that gave their slot to another one."""
    failed: int = 0


@dataclass(slots=True, eq=False)
class _Entry:
    spec: AdapterSpec
    weights: AdapterWeights | None = None
    slot: int | None = None
    work: Work | None = None
    """Under way."""
    pins: int = 0
    waiting: int = 0
    """Requests that wait for it."""
    rate: float = 0.0
    """Uses a second, averaged, as of ``rated_s``."""
    rated_s: float = 0.0
    error: Exception | None = None

    @property
    def is_on_device(self) -> bool:
        return self.slot is not None and self.work is not Work.FILL

    def heat(self, now: float) -> float:
        """Probability that it is used within ``MEMORY_S`` if it goes on being used at its pace."""
        return 1.0 - math.exp(-self._rate(now) * MEMORY_S)

    def note_use(self, now: float) -> None:
        self.rate = self._rate(now) + 1.0 / MEMORY_S
        self.rated_s = now

    def _rate(self, now: float) -> float:
        return self.rate * math.exp(-(now - self.rated_s) / MEMORY_S)


class AdapterCache:
    """Which adapter is where. One thread drives it.

    Args:
        num_slots: adapters that fit the device.
        dram_bytes: budget of the copies in DRAM. One that exceeds it alone passes through and is not kept.
        loader: does the work; owned from here on.
    """

    def __init__(self, num_slots: int, dram_bytes: int, loader: AdapterLoader) -> None:
        self.counters = AdapterCounters()
        self._dram_bytes = dram_bytes
        self._loader = loader
        self._slots: list[_Entry | None] = [None] * num_slots
        self._entries: dict[str, _Entry] = {}
        """By digest; in the order in which they came to be wanted."""

    def want(self, spec: AdapterSpec, now: float) -> None:
        """A request for this adapter waits, until ``try_pin`` or ``unwant``; bring it to the device."""
        entry = self._entries.setdefault(spec.digest, _Entry(spec, rated_s=now))
        entry.note_use(now)
        self.counters.uses += 1
        self.counters.uses_on_device += int(entry.is_on_device)
        entry.waiting += 1
        self.poll(now)

    def unwant(self, spec: AdapterSpec) -> None:
        """A request that waited is gone."""
        self._no_longer_waits(self._entries[spec.digest])

    def try_pin(self, spec: AdapterSpec) -> int | None:
        """Keep the adapter on the device until ``unpin``, for a request that waits for it and does so no longer.

        Returns:
            Its slot, or None if it is not there yet.

        Raises:
            ModelError: it could not be loaded. Once all that waited have been told, the next attempt begins anew.
        """
        entry = self._entries[spec.digest]
        if entry.error is not None:
            error = entry.error
            self._no_longer_waits(entry)
            raise ModelError(f"adapter {spec.name} cannot be loaded: {error}")
        if not entry.is_on_device:
            return None
        entry.pins += 1
        entry.waiting -= 1
        return entry.slot

    def unpin(self, spec: AdapterSpec) -> None:
        """One user is done."""
        entry = self._entries[spec.digest]
        if not entry.pins:
            raise IntegrityError(f"adapter {spec.name} is not pinned")
        entry.pins -= 1

    def waits_for_slot(self, spec: AdapterSpec) -> bool:
        """It can only come to the device when somebody unpins another one."""
        entry = self._entries.get(spec.digest)
        return entry is not None and entry.slot is None and all(e is not None and self._is_held(e) for e in self._slots)

    def poll(self, now: float) -> None:
        """Take over what has ended and begin what can be begun."""
        for done in self._loader.poll():
            self._take_over(done)
        for entry in list(self._entries.values()):
            if entry.waiting and entry.work is None and entry.slot is None and entry.error is None:
                self._advance(entry, now)
        self._trim(now)

    def forget(self, spec: AdapterSpec) -> None:
        """Nobody will ask for it any more: give up its copies once its last user is done."""
        entry = self._entries.get(spec.digest)
        if entry is not None and not self._is_held(entry):
            if entry.slot is not None:
                self._slots[entry.slot] = None
            del self._entries[spec.digest]

    def stats(self, now: float) -> dict[str, Any]:
        """JSON-able."""
        return {
            **asdict(self.counters),
            "slots": len(self._slots),
            "slots_used": sum(entry is not None for entry in self._slots),
            "pinned_adapters": sum(entry.pins > 0 for entry in self._entries.values()),
            "dram_bytes": self._dram_used(),
            "heat": {entry.spec.name: round(entry.heat(now), 4) for entry in self._entries.values()},
        }

    def check_integrity(self) -> None:
        """Raise IntegrityError if slots and entries do not agree."""
        for index, entry in enumerate(self._slots):
            if entry is not None and entry.slot != index:
                raise IntegrityError(f"adapter slot {index} is bound to an adapter that does not know it")
        bound = [entry.slot for entry in self._entries.values() if entry.slot is not None]
        if len(bound) != len(set(bound)) or len(bound) != sum(entry is not None for entry in self._slots):
            raise IntegrityError("adapter slots and adapters do not agree")

    def close(self, timeout_s: float) -> None:
        """Stop the loader, within the deadline. Idempotent."""
        self._loader.close(timeout_s)

    @staticmethod
    def _no_longer_waits(entry: _Entry) -> None:
        """A failure is told to those that waited for it; who asks later begins anew."""
        entry.waiting -= 1
        if not entry.waiting:
            entry.error = None

    def _advance(self, entry: _Entry, now: float) -> None:
        if entry.weights is None:
            entry.work = Work.READ
            self.counters.reads += 1
            self._loader.read(entry.spec)
            return
        slot = self._free_slot(now)
        if slot is not None:
            self._slots[slot] = entry
            entry.slot = slot
            entry.work = Work.FILL
            self.counters.fills += 1
            self._loader.fill(entry.spec, entry.weights, slot)

    def _take_over(self, done: Loaded) -> None:
        entry = self._entries[done.digest]
        entry.work = None
        if done.error is not None:
            entry.error = done.error
            self.counters.failed += 1
            if done.work is Work.FILL and entry.slot is not None:
                self._slots[entry.slot] = None
                entry.slot = None
        elif done.work is Work.READ:
            entry.weights = done.weights

    def _free_slot(self, now: float) -> int | None:
        """An empty slot, or that of the coldest adapter that nobody uses or waits for."""
        if None in self._slots:
            return self._slots.index(None)
        idle = [entry for entry in self._slots if entry is not None and not self._is_held(entry)]
        if not idle:
            return None
        coldest = min(idle, key=lambda entry: entry.heat(now))
        slot, coldest.slot = coldest.slot, None
        self.counters.evictions += 1
        return slot

    @staticmethod
    def _is_held(entry: _Entry) -> bool:
        return bool(entry.pins or entry.waiting or entry.work)

    def _trim(self, now: float) -> None:
        """Give up the coldest copies in DRAM beyond the budget; those that are about to be copied stay."""
        while self._dram_used() > self._dram_bytes:
            kept = [
                entry
                for entry in self._entries.values()
                if entry.weights is not None and entry.work is None and (entry.slot is not None or not entry.waiting)
            ]
            if not kept:
                return
            min(kept, key=lambda entry: entry.heat(now)).weights = None

    def _dram_used(self) -> int:
        return sum(entry.spec.num_bytes for entry in self._entries.values() if entry.weights is not None)
