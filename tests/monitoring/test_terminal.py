"""`dflash2 top` over a page that is served, and its words for what can go wrong."""

from __future__ import annotations

import io
import re
from pathlib import Path

import pytest
from rich.console import Console
from tests.monitoring.live import living

from dflash2.cli import main
from dflash2.commands.top import fetch, route_url
from dflash2.monitoring.standalone import MonitorServer
from dflash2.monitoring.terminal import screen, size


def text_of(stats: dict, before: dict | None = None, width: int = 120) -> str:
    console = Console(file=io.StringIO(), width=width, color_system=None)
    console.print(screen(stats, before, "here"))
    return console.file.getvalue()  # type: ignore[attr-defined]


def test_it_shows_the_figures_of_the_runtime(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with living(tmp_path) as live:
        live.until(lambda: live.num_turns > 20)
        live.hold_still()
        server = MonitorServer(live.runtime.observer)
        assert main(["top", "--once", "--url", server.url]) == 0
        shown = capsys.readouterr().out
        counters = live.runtime.stats()["counters"]
        server.close()
    assert re.search(rf"blocks swapped in\s+{counters['swap_in_blocks']:,}\b", shown)
    assert "enabled" in shown and "of 64" in shown and "health" in shown


def test_blocks_and_why(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "140")
    with living(tmp_path) as live:
        live.until(lambda: live.num_turns > 10)
        live.hold_still()
        server = MonitorServer(live.runtime.observer)
        assert main(["blocks", "--url", server.url, "--count", "2"]) == 0
        server.close()
    shown = capsys.readouterr().out
    assert shown.count("hottest") == shown.count("coldest") == 1
    assert len(re.findall(r"│ +\d+ │ +[01]\.\d\d │", shown)) == 4 and shown.count("why") == 2


@pytest.mark.parametrize("width", [60, 80, 200])
def test_it_fits_any_terminal_and_needs_no_figures(width: int) -> None:
    assert all(len(line) <= width for line in text_of({}, width=width).splitlines())


def test_flows_are_what_moved_between_two_looks() -> None:
    def stats(time: float, moved: int) -> dict:
        return {"enabled": True, "time": time, "transfer": {"routes": {"hbm_to_dram": {"bytes": moved}}}}

    shown = text_of(stats(12.0, 5_000_000), stats(10.0, 1_000_000))
    hbm, dram = (next(line for line in shown.splitlines() if name in line) for name in ("HBM ", "DRAM "))
    assert "2.0 MB/s" in hbm and "2.0 MB/s" in dram


def test_advice_is_shown() -> None:
    assert "nvme-slow: it is" in text_of({"warnings": [{"id": "nvme-slow", "text": "it is", "time": 1}]})


@pytest.mark.parametrize(("value", "text"), [(0, "0 B"), (999, "999 B"), (1_000, "1.0 kB"), (48.5e9, "48.5 GB")])
def test_sizes(value: float, text: str) -> None:
    assert size(value) == text


def test_the_address_of_the_server_or_of_its_page_will_do() -> None:
    for url in ("http://h:1", "http://h:1/", "http://h:1/dflash2/", "http://h:1/dflash2"):
        assert route_url(url, "stats") == "http://h:1/dflash2/stats"


def test_a_missing_key_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with living(tmp_path) as live:
        server = MonitorServer(live.runtime.observer, token="t")
        assert main(["top", "--once", "--url", server.url]) == 1
        assert "--token" in capsys.readouterr().err
        assert fetch(route_url(server.url, "stats"), "t")["enabled"] is True
        server.close()


def test_a_server_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["top", "--once", "--url", "http://127.0.0.1:9"]) == 1
    assert "no answer from" in capsys.readouterr().err
