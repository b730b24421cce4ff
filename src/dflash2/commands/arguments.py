"""Arguments that several commands take: numbers within bounds, and a server's API key."""

from __future__ import annotations

import argparse
import os

KEY_VARIABLE = "DFLASH2_API_KEY"


def api_key(given: str | None) -> str | None:
    """The key of the command line, else of the environment, else none."""
    return given or os.environ.get(KEY_VARIABLE) or None


def positive_int(text: str) -> int:
    """A whole number of at least 1."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, not {value}")
    return value


def positive_float(text: str) -> float:
    """A finite number above 0."""
    value = float(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"must be a number above 0, not {text}")
    return value
