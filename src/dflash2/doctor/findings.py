"""What a check says, and what all of them together mean."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum


class Status(Enum):
    """How a check ended."""

    OK = "ok"
    WARN = "warn"
    ERROR = "error"
    SKIPPED = "skipped"
    """It does not apply here; ``found`` says why."""


EXIT_CODES = {Status.SKIPPED: 0, Status.OK: 0, Status.WARN: 1, Status.ERROR: 2}


@dataclass(frozen=True, slots=True)
class Finding:
    """Outcome of one check.

    Attributes:
        status: see ``Status``.
        found: what is there.
        advice: what to do; may be empty where nothing needs doing.
    """

    status: Status
    found: str
    advice: str = ""


def ok(found: str, advice: str = "") -> Finding:
    """All is well."""
    return Finding(Status.OK, found, advice)


def warn(found: str, advice: str) -> Finding:
    """It will run, but worse than it could."""
    return Finding(Status.WARN, found, advice)


def error(found: str, advice: str) -> Finding:
    """It will not run, or not for long."""
    return Finding(Status.ERROR, found, advice)


def skipped(reason: str) -> Finding:
    """Nothing to check."""
    return Finding(Status.SKIPPED, reason)


def worst(findings: Sequence[Finding]) -> Finding:
    """One finding for several things of a kind: how the worst of them stand."""
    order = (Status.ERROR, Status.WARN, Status.OK, Status.SKIPPED)
    status = min((finding.status for finding in findings), key=order.index)
    alike = [finding for finding in findings if finding.status is status]
    advice = dict.fromkeys(finding.advice for finding in alike if finding.advice)
    return Finding(status, "; ".join(dict.fromkeys(finding.found for finding in alike)), "; ".join(advice))


def gib(num_bytes: float) -> str:
    """Bytes for people: GiB, or MiB below one."""
    return f"{num_bytes / 2**30:.1f} GiB" if num_bytes >= 2**30 else f"{num_bytes / 2**20:.0f} MiB"
