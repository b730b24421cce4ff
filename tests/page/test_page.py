"""The page in a real browser: it works, it can be used by everybody, and what it changes acts."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from tests.monitoring.live import Live, living

from dflash2.monitoring.standalone import MonitorServer

PATIENCE_MS = 60_000
SIZES = {"desktop": (1280, 900), "phone": (360, 740)}


@contextmanager
def opened(browser: Any, url: str, **options: Any) -> Iterator[Any]:
    """A page that asks nobody but its own server and raises no error."""
    context = browser.new_context(**options)
    page = context.new_page()
    page.set_default_timeout(PATIENCE_MS)
    problems: list[str] = []
    origin = "/".join(url.split("/")[:3])
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.on("console", lambda line: problems.append(line.text) if line.type in ("error", "warning") else None)
    page.on(
        "request",
        lambda request: None if request.url.startswith((origin, "data:", "blob:")) else problems.append(request.url),
    )
    try:
        page.goto(url)
        yield page
        assert problems == []
    finally:
        context.close()


def ready(page: Any) -> None:
    """All panels have been filled."""
    for part in ("#hottest tbody tr", "#curves svg polyline", "#cold_threshold"):
        page.wait_for_selector(part, state="attached")  # a curve that is flat has no height, and counts as hidden


def number(page: Any, panel: str, term: str) -> int:
    return int(page.locator(f"#{panel} dt:text-is('{term}') + dd").inner_text().replace(",", ""))


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", SIZES)
def test_every_panel_is_filled_accessible_and_fits(
    size: str, scheme: str, browser: Any, server: MonitorServer, tmp_path: Path
) -> None:
    axe = pytest.importorskip("axe_playwright_python.sync_playwright")
    width, height = SIZES[size]
    with opened(browser, server.url, viewport={"width": width, "height": height}, color_scheme=scheme) as page:
        ready(page)
        assert page.locator("#state").inner_text() == "enabled"
        assert page.locator("#tiers .tier").count() == 3
        assert page.locator("#curves figure").count() == 9
        assert page.locator("main section:visible").count() >= 12
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), "it must not scroll sideways"
        page.screenshot(path=str(tmp_path / f"{size}-{scheme}.png"), full_page=True)
        found = axe.Axe().run(page).response["violations"]
        assert [(one["id"], [node["html"] for node in one["nodes"]]) for one in found] == []


def test_figures_are_those_of_the_runtime(browser: Any, live: Live, server: MonitorServer) -> None:
    live.hold_still()
    stats = live.runtime.stats()
    with opened(browser, server.url) as page:
        ready(page)
        assert number(page, "swaps", "blocks swapped in") == stats["counters"]["swap_in_blocks"] > 0
        assert number(page, "swaps", "blocks swapped out") == stats["counters"]["swap_out_blocks"] > 0
        assert number(page, "swaps", "loaded from NVMe") == stats["counters"]["loaded_from_nvme_blocks"]
        assert page.locator("#hbm-hit").inner_text() == f"{100 * stats['hbm_hit_rate']:.2f} %"
        used, capacity = stats["tiers"]["dram"]["used_blocks"], stats["tiers"]["dram"]["capacity_blocks"]
        assert page.locator("#dram-used").inner_text() == f"{used} of {capacity} blocks"


def test_a_slider_acts_at_once_and_is_undone(
    browser: Any, live: Live, server: MonitorServer, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    with opened(browser, server.url) as page:
        ready(page)
        slider = page.locator("#cold_threshold")
        assert slider.input_value() == "0.8" and page.locator("#undo").is_disabled()
        slider.fill("0.35")
        slider.dispatch_event("change")
        page.wait_for_selector("#undo:enabled")
        assert live.runtime.config.policy.cold_threshold == 0.35
        assert "cold_threshold 0.8 → 0.35" in page.locator("#policy-log").inner_text()
        assert "cold_threshold changed from 0.8 to 0.35" in caplog.text
        live.until(lambda: live.runtime.stats()["cold_threshold"] == 0.35)
        page.locator("#undo").click()
        page.wait_for_selector("#undo:disabled")
        assert live.runtime.config.policy.cold_threshold == 0.8 and slider.input_value() == "0.8"


def test_sliders_work_with_the_keyboard(browser: Any, live: Live, server: MonitorServer) -> None:
    with opened(browser, server.url) as page:
        ready(page)
        page.locator("#prefetch_window").focus()
        page.keyboard.press("ArrowRight")
        page.wait_for_selector("#undo:enabled")
        assert live.runtime.config.kv_block.prefetch_window == 5


def test_the_theme_is_chosen_and_remembered(browser: Any, server: MonitorServer) -> None:
    with opened(browser, server.url, color_scheme="light") as page:
        for expected in ("light", "dark"):
            page.locator("#theme").click()
            assert page.evaluate("document.documentElement.dataset.theme") == expected
        page.reload()
        assert page.locator("#theme").inner_text() == "Theme: dark"
        assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(17, 20, 26)"


def test_spans_and_csv(browser: Any, server: MonitorServer) -> None:
    with opened(browser, server.url) as page:
        ready(page)
        with page.expect_request(lambda request: "history?span=3d" in request.url):
            page.locator("#span").select_option("3d")
        with page.expect_download() as download:
            page.locator("#csv").click()
        lines = Path(download.value.path()).read_text().splitlines()
        assert download.value.suggested_filename == "dflash2-3d.csv" and lines[0].startswith("time,") and len(lines) > 1


def test_without_a_history_the_page_draws_what_it_has_seen(browser: Any, tmp_path: Path) -> None:
    with living(tmp_path) as live:
        server = MonitorServer(live.runtime.observer)
        with opened(browser, server.url) as page:
            ready(page)
            assert "history_enabled" in page.locator("#curves-note").inner_text()
            assert page.locator("#csv").is_hidden() and page.locator("#span").is_disabled()
        server.close()


def test_a_token_is_asked_for_and_kept_in_the_tab(browser: Any, live: Live) -> None:
    server = MonitorServer(live.runtime.observer, token="s3cret")
    context = browser.new_context()
    page = context.new_page()
    page.set_default_timeout(PATIENCE_MS)
    page.goto(server.url)
    page.wait_for_selector("#login:not([hidden])")
    page.locator("#token").fill("s3cret")
    page.locator("#login button").click()
    ready(page)
    assert page.locator("#login").is_hidden() and "s3cret" not in page.url
    context.close()
    with opened(browser, server.url + "#token=s3cret") as page:
        ready(page)
        assert "s3cret" not in page.url
    server.close()


def test_a_server_that_is_gone_is_said(browser: Any, server: MonitorServer) -> None:
    context = browser.new_context()
    page = context.new_page()
    page.set_default_timeout(PATIENCE_MS)
    page.goto(server.url)
    ready(page)
    server.close()
    page.wait_for_selector("#state:has-text('no answer')")
    context.close()
