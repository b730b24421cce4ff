"""Of a session's blocks, how many are used when it comes back: learned by the class of their segment."""

from __future__ import annotations

from dflash2.policy.segments import SegmentClass

LEFT_LEVELS = 6
LEVEL_OF_LEFT_TAIL = 6
"""A partial block that was left has a level of its own; the others count how often they were left."""
ASSUMED = {SegmentClass.MAIN: (9.0, 10.0), SegmentClass.TAIL: (1.0, 4.0), SegmentClass.LEFT: (1.0, 4.0)}
"""(used, seen) before anything was seen."""


class ShareOfUse:
    """Running averages by class and level."""

    def __init__(self) -> None:
        self._seen: dict[tuple[SegmentClass, int], tuple[float, float]] = {}

    def of(self, kind: SegmentClass, level: int) -> float:
        """Expected share of a segment's blocks; 1 for classes that no session decides about."""
        used, seen = self._seen.get((kind, level), ASSUMED.get(kind, (1.0, 1.0)))
        return used / seen

    def note(self, kind: SegmentClass, level: int, share: float) -> None:
        """Of a segment this share was used when its session came back."""
        used, seen = self._seen.get((kind, level), ASSUMED.get(kind, (1.0, 1.0)))
        self._seen[kind, level] = (used + share, seen + 1.0)

    def state(self) -> list[list[float]]:
        """Class, level, used and seen."""
        return [[float(kind), float(level), used, seen] for (kind, level), (used, seen) in self._seen.items()]

    def restore(self, rows: list[list[float]]) -> None:
        """Take over what ``state`` returned."""
        self._seen = {(SegmentClass(int(kind)), int(level)): (used, seen) for kind, level, used, seen in rows}

    def level_left(self, kind: SegmentClass, level: int) -> int:
        """Level of what is left of a segment."""
        if kind is SegmentClass.TAIL or level == LEVEL_OF_LEFT_TAIL:
            return LEVEL_OF_LEFT_TAIL
        return min(level + 1, LEFT_LEVELS - 1) if kind is SegmentClass.LEFT else 0
