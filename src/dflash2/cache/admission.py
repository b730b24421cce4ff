"""How much new demand is let in while memory is short, and why a request waits (R-4.2)."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from dflash2.cache.smoothing import ButterworthLowPass

LANE_SHARE = 16
"""One part in so many of HBM is left to small requests while there is pressure."""
SMALL_SHARE = 64
"""A request is small if it is expected to need at most one part in so many of HBM."""
RATE_SMOOTHING = 0.2
"""Weight of the newest gap in the average time between two admissions."""


class WaitReason(Enum):
    """Why a request has not been admitted yet."""

    QUEUED = "others are before it"
    ROOM = "all tiers together have no room for it"
    SMOOTHED = "HBM is full and new demand is let in little by little"
    SEATS = "as many requests run as scheduling.max_running allows"
    GROWTH = "running requests need what is free"


@dataclass(slots=True)
class AdmissionCounters:
    """What admission did since its start."""

    pressure_steps: int = 0
    """Steps in which more was wanted than HBM holds."""
    smoothed_steps: int = 0
    """Steps in which the next request was held back though the tiers had room."""
    overdue_requests: int = 0
    """Requests let in past the smoothing because half their time to wait was over."""


class Admission:
    """Bounds what is let into the working set of HBM.

    Without pressure, that is while all that runs and waits fits HBM together, everything is let in at once. Under
    pressure the bound is the low-passed demand, and never less than HBM: a burst that is soon worked off fills HBM and
    goes no further, so it causes no swapping; demand that stays is let in, and HBM is shared by turns.

    Small requests have a lane of their own, a part of HBM that the others leave free: they start at once where a place
    in the line would cost them many times their own length.

    Args:
        hbm_blocks: what HBM holds.
        smoother: None lets everything in that was reserved.
    """

    def __init__(self, hbm_blocks: int, smoother: ButterworthLowPass | None) -> None:
        self._hbm_blocks = hbm_blocks
        self._lane_blocks = hbm_blocks // LANE_SHARE
        self._smoother = smoother
        self._in_use = 0
        self._in_lane = 0
        self._bound: float | None = None
        self.counters = AdmissionCounters()
        self._last_admission_s: float | None = None
        self._gap_s = 0.0

    @property
    def under_pressure(self) -> bool:
        return self._bound is not None

    @property
    def bound_blocks(self) -> float | None:
        """The smoothed demand, to which the working set may grow beyond HBM; None without pressure."""
        return self._bound

    def is_small(self, blocks: int) -> bool:
        """Whether a request that is expected to need so many blocks may use the lane."""
        return blocks * SMALL_SHARE <= self._hbm_blocks

    def tick(self, in_use: int, waiting: int, in_lane: int = 0) -> None:
        """Once a scheduler step.

        Args:
            in_use: distinct blocks that running requests have, and need for a turn.
            waiting: blocks that waiting requests need for their first turn.
            in_lane: of those in use, the blocks of small requests.
        """
        self._in_use, self._in_lane = in_use, in_lane
        if in_use + waiting <= self._hbm_blocks or self._smoother is None:
            self._bound = None
            return
        self.counters.pressure_steps += 1
        if self._bound is None:
            self._smoother.reset(min(in_use, self._hbm_blocks))
        self._bound = self._smoother.step(in_use + waiting)

    def lets_in(self, blocks: int, *, small: bool = False, overdue: bool = False) -> bool:
        """Whether a request that needs so many blocks for its first turn may start in this step.

        Args:
            blocks: those that no running request has already.
            small: it uses the lane.
            overdue: half its time to wait is over; from then on only the ledger can hold it back.
        """
        if self._bound is None or self._in_use == 0 or self._fits(blocks, small, self._bound):
            return True
        if overdue:
            self.counters.overdue_requests += 1
            return True
        self.counters.smoothed_steps += 1
        return False

    def note_admitted(self, blocks: int, now: float, *, small: bool = False) -> None:
        """A request was let in."""
        self._in_use += blocks
        self._in_lane += blocks if small else 0
        if self._last_admission_s is not None:
            self._gap_s += RATE_SMOOTHING * (now - self._last_admission_s - self._gap_s)
        self._last_admission_s = now

    def expected_wait_s(self, num_before: int) -> float:
        """About how long a request waits that has so many before it, at the pace of the last admissions."""
        return self._gap_s * (num_before + 1)

    def _fits(self, blocks: int, small: bool, bound: float) -> bool:
        if small:
            return self._in_use + blocks <= max(self._hbm_blocks, bound + self._lane_blocks)
        return self._in_use - self._in_lane + blocks <= max(self._hbm_blocks - self._lane_blocks, bound)
