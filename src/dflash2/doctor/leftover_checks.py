"""Leftovers of the first generation (R-6.5)."""

from __future__ import annotations

from dflash2.config.first_generation import SHARED_MEMORY, describe_variable, has_shared_memory, old_variables
from dflash2.doctor.case import Case
from dflash2.doctor.findings import Finding, ok, warn


def check_old_variables(case: Case) -> Finding:
    """No ``DFLASH_*`` variable is set: none of them acts."""
    found = old_variables(case.machine.environ)
    if not found:
        return ok("no DFLASH_* variable is set")
    return warn(
        "; ".join(describe_variable(variable) for variable in found),
        "`dflash2 config migrate` writes a configuration from them; then unset them",
    )


def check_old_shared_memory(case: Case) -> Finding:
    """The first generation's shared memory is gone."""
    if not has_shared_memory(case.machine.root):
        return ok(f"{SHARED_MEMORY} is not there")
    return warn(
        f"{SHARED_MEMORY} is no longer used and still holds memory",
        f"once no process of the first generation runs: rm -r {SHARED_MEMORY}",
    )
