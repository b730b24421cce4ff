"""Finds numbers in nested statistics."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from dflash2.types import Tier

TIERS = tuple(tier.label for tier in Tier)


def number_at(stats: Mapping[str, Any], keys: Sequence[str]) -> float:
    """The number at the end of ``keys``; 0 if the way there does not exist."""
    value: Any = stats
    for key in keys:
        value = value.get(key) if isinstance(value, Mapping) else None
    return 0.0 if value is None else float(value)
