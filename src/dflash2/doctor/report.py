"""The results of the checks as text and as JSON."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.padding import Padding
from rich.text import Text

from dflash2.doctor.checks import CheckResult, exit_code
from dflash2.doctor.findings import Status

JSON_FORMAT = 1
_STYLES = {Status.OK: "green", Status.WARN: "yellow", Status.ERROR: "red", Status.SKIPPED: "bright_black"}
_MARK_WIDTH = 9


def print_report(results: Sequence[CheckResult], console: Console) -> None:
    """One paragraph a check: status, id, what was found, what to do; then the sum."""
    for result in results:
        finding = result.finding
        mark = Text(finding.status.value.ljust(_MARK_WIDTH), style=_STYLES[finding.status])
        console.print(mark + Text(result.id, style="bold"))
        console.print(Padding(Text(finding.found), (0, 0, 0, _MARK_WIDTH), expand=False))
        if finding.advice:
            console.print(Padding(Text(f"-> {finding.advice}", style="cyan"), (0, 0, 0, _MARK_WIDTH), expand=False))
    counts = Counter(result.finding.status for result in results)
    console.print(Text(", ".join(f"{counts[status]} {status.value}" for status in Status), style="bold"))


def report_json(results: Sequence[CheckResult]) -> dict[str, Any]:
    """``{format, exit_code, checks: [{id, status, found, advice}]}``."""
    checks = [
        {
            "id": result.id,
            "status": result.finding.status.value,
            "found": result.finding.found,
            "advice": result.finding.advice,
        }
        for result in results
    ]
    return {"format": JSON_FORMAT, "exit_code": exit_code(list(results)), "checks": checks}
