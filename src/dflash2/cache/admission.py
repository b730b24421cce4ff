"""Who shares HBM by turns while it is short, and why a request waits (R-4.2)."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from dflash2.cache.smoothing import ButterworthLowPass

LANE_SHARE = 16
"""One part in so many of HBM is left to small requests while there is pressure."""
SMALL_SHARE = 64
"""No request is small that is expected to need more than one part in so many of HBM: four at least share the lane."""
RATE_SMOOTHING = 0.2
"""Weight of the newest gap in the average time between two admissions."""


class WaitReason(Enum):
    """Why a request waits."""

    QUEUED = "others are before it"
    ROOM = "all tiers together have no room for it"
    SMOOTHED = "HBM is full; after its first turn it goes on when others end, or by and by"
    SEATS = "as many requests run as scheduling.max_running allows"
    GROWTH = "running requests need what is free"


@dataclass(slots=True)
class AdmissionCounters:
    """What admission did since its start."""

    pressure_steps: int = 0
    """Steps in which more was wanted than HBM holds."""
    smoothed_steps: int = 0
    """Steps in which a request was held back that would have displaced another one."""


class Admission:
    """Bounds what shares HBM by turns.

    Without pressure, that is while all that runs and waits fits HBM together, nobody is held back. Under pressure a
    further request takes turns only within the low-passed demand, which begins at what HBM holds: after a burst that is
    soon worked off everybody goes on when others have ended, and is swapped out and in once; demand that stays is let
    in, and shares HBM by turns.

    Small requests have a lane of their own, a part of HBM that the others leave free: they start at once where a place
    in the line would cost them many times their own length.

    Args:
        hbm_blocks: what HBM holds.
        smoother: None lets everybody take turns.
    """

    def __init__(self, hbm_blocks: int, smoother: ButterworthLowPass | None) -> None:
        self._hbm_blocks = hbm_blocks
        self._smoother = smoother
        self._in_use = 0
        self._in_lane = 0
        self._bound: float | None = None
        self.holds_back = False
        """Somebody was held back in this step; nobody behind takes turns."""
        self.counters = AdmissionCounters()
        self._last_admission_s: float | None = None
        self._gap_s = 0.0

    @property
    def smooths(self) -> bool:
        return self._smoother is not None

    @property
    def under_pressure(self) -> bool:
        return self._bound is not None

    @property
    def lane_blocks(self) -> int:
        """What is left of the small requests' lane; none without pressure."""
        return max(0, self._hbm_blocks // LANE_SHARE - self._in_lane) if self.under_pressure else 0

    def fits_lane(self, blocks: int) -> bool:
        """Whether the lane is for requests that are expected to need so many blocks, where they are short."""
        return blocks * SMALL_SHARE <= self._hbm_blocks

    def tick(self, in_use: int, waiting: int, in_lane: int = 0) -> None:
        """Once a scheduler step.

        Args:
            in_use: distinct blocks of the requests in HBM or taking turns there, at the end of their turns.
            waiting: further blocks that all others need for a turn.
            in_lane: of those in use, the blocks of small requests in HBM.
        """
        self._in_use, self._in_lane = in_use, in_lane
        self.holds_back = False
        if in_use + waiting <= self._hbm_blocks or self._smoother is None:
            self._bound = None
            return
        self.counters.pressure_steps += 1
        if self._bound is None:
            self._smoother.reset(min(in_use, self._hbm_blocks))
        self._bound = self._smoother.step(in_use + waiting)

    def lets_in(self, blocks: int) -> bool:
        """Whether one more request takes turns from now on; nobody does in this step behind one that does not.

        Args:
            blocks: those that it needs for a turn and no request in HBM or taking turns has.
        """
        if self._bound is None:
            return True
        if self.holds_back:
            return False
        if self._in_use + blocks > self._bound:
            self.holds_back = True
            self.counters.smoothed_steps += 1
            return False
        self._in_use += blocks
        return True

    def note_small(self, blocks: int) -> None:
        """A small request takes its place in HBM in this step."""
        self._in_lane += blocks

    def note_admitted(self, now: float) -> None:
        """A request was given its reservation."""
        if self._last_admission_s is not None:
            self._gap_s += RATE_SMOOTHING * (now - self._last_admission_s - self._gap_s)
        self._last_admission_s = now

    def expected_wait_s(self, num_before: int) -> float:
        """About how long a request waits that has so many before it, at the pace of the last admissions."""
        return self._gap_s * (num_before + 1)
