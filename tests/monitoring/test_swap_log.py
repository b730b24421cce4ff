"""The lines that ``grep dflash2_swap`` finds."""

from __future__ import annotations

import logging

import pytest

from dflash2.monitoring.counters import CacheCounters
from dflash2.monitoring.swap_log import INTERVAL_S, SwapLog
from dflash2.table.page_table import PageTable
from dflash2.types import Tier


def test_a_line_only_when_time_has_passed_and_something_moved(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    counters = CacheCounters()
    log = SwapLog(PageTable({Tier.HBM: 4, Tier.DRAM: 2}), counters, now=100.0)
    log.step(100.0 + INTERVAL_S)
    assert caplog.messages == []
    counters.swap_out_blocks = 3
    log.step(101.0 + INTERVAL_S)
    assert caplog.messages == []
    log.step(100.0 + 2 * INTERVAL_S)
    log.step(100.0 + 3 * INTERVAL_S)
    (line,) = caplog.messages
    assert line.startswith("dflash2_swap ") and "swap_out_blocks=+3" in line and "hbm=0/4 dram=0/2 nvme=0/0" in line
