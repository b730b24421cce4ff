"""A transfer engine that follows a script: real bytes, and nothing ends before it is told to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from dflash2.errors import IntegrityError
from dflash2.transfer.base import Completion, CopyJob
from dflash2.types import Tier

Words = npt.NDArray[np.int64]

POISON = -0x5EED
"""What a slot holds that nothing has been copied to."""


@dataclass
class _Flight:
    job: CopyJob
    early: Words
    """What the sources held when the job was submitted."""


class ScriptedTransfer:
    """Copies rows of words between arrays, as unkindly as the protocol allows.

    A destination is poisoned as soon as its copy is submitted and stays so if the copy fails. The first half of a block
    is read at submission and the second at the end, so a block written meanwhile arrives torn.

    Args:
        memory: int64 ``[num_slots, words]`` for each tier.
    """

    def __init__(self, memory: Mapping[Tier, Words]) -> None:
        self.memory = dict(memory)
        self.flights: dict[int, _Flight] = {}
        self.submitted: list[CopyJob] = []
        self.prompt = False
        """Jobs end, well, in the poll after their submission."""
        self.is_pressed = False
        """NVMe is to be spared."""
        self.deaf = False
        """Nothing ends, not even when it is waited for."""
        self.fail_next: list[tuple[bool, bool]] = []
        """(ok, bad_source) for the first block of each of the next loads to end by themselves."""
        self._rotten: set[tuple[Tier, int]] = set()
        """Slots whose content cannot be read any more, whoever reads it."""
        self._done: list[Completion] = []
        self._next_ticket = 1

    # -- the script ----------------------------------------------------------------------------------------------

    @property
    def in_flight(self) -> list[int]:
        """Tickets in the order of submission."""
        return list(self.flights)

    def end(self, ticket: int, ok: Sequence[bool] | bool = True, bad_source: Sequence[bool] | bool = False) -> None:
        """End a job; a single bool counts for all its blocks. ``bad_source`` matters only where ``ok`` is False."""
        flight = self.flights.pop(ticket)
        job = flight.job
        count = len(job.src_slots)
        rotten = np.array([(job.src, slot) in self._rotten for slot in job.src_slots.tolist()], np.bool_)
        arrived = (np.zeros(count, np.bool_) | np.asarray(ok, np.bool_)) & ~rotten
        bad = (np.zeros(count, np.bool_) | np.asarray(bad_source, np.bool_) | rotten) & ~arrived
        words = self.memory[job.src][job.src_slots].copy()
        half = words.shape[1] // 2
        words[:, :half] = flight.early[:, :half]
        self.memory[job.dst][job.dst_slots[arrived]] = words[arrived]
        self.memory[job.src][job.src_slots[bad]] = POISON
        self._rotten |= {(job.src, slot) for slot in job.src_slots[bad].tolist()}
        self._done.append(Completion(ticket, job, arrived, bad, 0.001))

    def end_all(self) -> None:
        for ticket in self.in_flight:
            self._end_by_itself(ticket)

    def _end_by_itself(self, ticket: int) -> None:
        job = self.flights[ticket].job
        ok, bad = np.ones(len(job.src_slots), np.bool_), False
        if self.fail_next and job.dst is Tier.HBM:
            ok[0], bad = self.fail_next.pop(0)
        self.end(ticket, ok.tolist(), bad)

    # -- TransferEngine ------------------------------------------------------------------------------------------

    def submit(self, job: CopyJob) -> int:
        self._check(job)
        ticket = self._next_ticket
        self._next_ticket += 1
        self.flights[ticket] = _Flight(job, self.memory[job.src][job.src_slots].copy())
        self.memory[job.dst][job.dst_slots] = POISON
        self._rotten -= {(job.dst, slot) for slot in job.dst_slots.tolist()}
        self.submitted.append(job)
        return ticket

    def poll(self) -> list[Completion]:
        if self.prompt:
            self.end_all()
        done, self._done = self._done, []
        return done

    def wait(self, tickets: list[int], timeout_s: float) -> bool:
        if self.deaf:
            return False
        for ticket in tickets:
            if ticket in self.flights:
                self._end_by_itself(ticket)
        return True

    def cancel(self, ticket: int) -> bool:
        if ticket not in self.flights:
            return False
        self.end(ticket, ok=False)
        return True

    def close(self, timeout_s: float) -> None:
        for ticket in self.in_flight:
            self.end(ticket, ok=False)

    def check_integrity(self) -> None:
        """Raise IntegrityError if two copies share a destination or one reads what another writes."""
        written: set[tuple[Tier, int]] = set()
        for flight in self.flights.values():
            slots = {(flight.job.dst, int(slot)) for slot in flight.job.dst_slots}
            if written & slots:
                raise IntegrityError("two copies in flight have the same destination")
            written |= slots
        for flight in self.flights.values():
            if written & {(flight.job.src, int(slot)) for slot in flight.job.src_slots}:
                raise IntegrityError("a copy in flight reads what another one writes")

    def _check(self, job: CopyJob) -> None:
        for tier, slots in ((job.src, job.src_slots), (job.dst, job.dst_slots)):
            if len(np.unique(slots)) != len(slots) or slots.min() < 0 or slots.max() >= len(self.memory[tier]):
                raise IntegrityError(f"bad slots {slots} on {tier.label}")
        if job.src is job.dst or len(job.src_slots) != len(job.dst_slots):
            raise IntegrityError("a copy within a tier, or of unequal lengths")
