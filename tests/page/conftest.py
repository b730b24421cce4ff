"""A browser, if this machine has one."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.monitoring.live import Live, living

from dflash2.monitoring.standalone import MonitorServer


def chromium() -> str | None:
    """The browser named by DFLASH2_TEST_CHROMIUM, or one on the path."""
    named = os.environ.get("DFLASH2_TEST_CHROMIUM")
    return named or next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """While it is open, no test of this thread can run an event loop of its own."""
    program = chromium()
    if program is None:
        pytest.skip("no Chromium here: install it, or name one in DFLASH2_TEST_CHROMIUM")
    sync_api = pytest.importorskip("playwright.sync_api")
    with sync_api.sync_playwright() as playwright:
        # Without its own sandbox, which needs rights that a container does not give; the only page is ours.
        browser = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def live(tmp_path: Path) -> Iterator[Live]:
    with living(tmp_path, history_enabled=True) as live:
        live.until(lambda: live.num_turns > 20)
        yield live


@pytest.fixture
def server(live: Live) -> Iterator[MonitorServer]:
    server = MonitorServer(live.runtime.observer)
    yield server
    server.close()
