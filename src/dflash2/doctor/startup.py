"""The doctor's findings as lines for a server's log."""

from __future__ import annotations

from pathlib import Path

from dflash2.doctor.case import open_case, read_config
from dflash2.doctor.checks import run_checks
from dflash2.doctor.findings import Status
from dflash2.doctor.machine import Machine


def startup_lines(config_file: Path | None, machine: Machine | None = None) -> list[str]:
    """What is not well with this machine and configuration: one line each, with what to do. Measures nothing.

    Raises:
        StorageError: the machine does not say how much memory it has.
    """
    results = run_checks(open_case(machine or Machine(), read_config(config_file)))
    ill = (result for result in results if result.finding.status in (Status.WARN, Status.ERROR))
    return [f"{result.id}: {result.finding.found}; {result.finding.advice}" for result in ill]
