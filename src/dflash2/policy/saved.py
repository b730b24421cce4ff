"""What a policy has learned, in a file between two runs."""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path

from dflash2.policy.base import PlacementPolicy

logger = logging.getLogger(__name__)

MAX_FILE_BYTES = 32 << 20


def load_policy(policy: PlacementPolicy, file: Path) -> None:
    """Give a policy what an earlier run has saved; without a readable file it begins anew, which costs hits only."""
    try:
        if file.stat().st_size > MAX_FILE_BYTES:
            raise ValueError("larger than any such file")
        state = json.loads(file.read_text("utf-8"))
        if not isinstance(state, dict):
            raise ValueError("not an object")
    except FileNotFoundError:
        return
    except (OSError, ValueError) as error:
        logger.warning("%s cannot be used, the policy begins anew: %s", file, error)
        return
    policy.restore(state)


def save_policy(policy: PlacementPolicy, file: Path) -> None:
    """Save what a policy has learned, whole or not at all; readable by its owner only."""
    state = policy.state()
    if not state:
        return
    beside = file.with_name(file.name + ".new")
    try:
        descriptor = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(descriptor, "w", encoding="utf-8") as stream:
            json.dump(state, stream)
        beside.replace(file)
    except OSError as error:
        logger.warning("what the policy has learned cannot be saved: %s", error)
