"""The monitoring page of one rank, on a loopback port of its own: SGLang's server is not ours to add routes to."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dflash2.errors import DFlash2Error
from dflash2.integrations.sglang.errors import refuse
from dflash2.runtime import Runtime

if TYPE_CHECKING:
    from dflash2.monitoring.standalone import MonitorServer


def show_page(runtime: Runtime, port: int | None, rank_of_machine: int) -> MonitorServer | None:
    """Serve the page if ``page_port`` is set; ends the process where the port cannot be had.

    Args:
        runtime: driven by the scheduler's thread, which also answers the page's questions, once a step.
        port: ``page_port``.
        rank_of_machine: added to the port.
    """
    if port is None:
        return None
    from dflash2.monitoring.standalone import MonitorServer  # needs fastapi, which only a page needs

    try:
        return MonitorServer(runtime.observer, port=port + rank_of_machine)
    except DFlash2Error as error:
        refuse(f"page_port: {error}")
