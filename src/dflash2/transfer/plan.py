"""Turns pairs of rows into as few copies as possible: runs of neighbours, and rows collected into a run."""

from __future__ import annotations

from dataclasses import dataclass

from dflash2.types import IntArray


@dataclass(frozen=True, slots=True)
class Run:
    """Destination rows ``dst`` to ``dst + len(src) - 1``, each from the source row at the same place in ``src``."""

    dst: int
    src: list[int]

    @property
    def is_straight(self) -> bool:
        """True where the source rows are neighbours too, in order: one plain copy."""
        first = self.src[0]
        return self.src == list(range(first, first + len(self.src)))


def merge_runs(src_rows: IntArray, dst_rows: IntArray) -> list[Run]:
    """Group copies ``src_rows[i] -> dst_rows[i]`` by neighbouring destinations; the order of copies is free.

    Lists, not arrays: a batch has a few dozen rows, and NumPy would take longer to start than to count them.

    Args:
        src_rows: int32 ``[n]``.
        dst_rows: int32 ``[n]``, distinct.

    Returns:
        The fewest runs, ascending; together they name every pair once.
    """
    runs: list[Run] = []
    expected: int | None = None
    for dst, src in sorted(zip(dst_rows.tolist(), src_rows.tolist(), strict=True)):
        if dst == expected:
            runs[-1].src.append(src)
        else:
            runs.append(Run(dst, [src]))
        expected = dst + 1
    return runs
