"""What a new user does: serve, cause pressure, watch the swaps in four places, change a setting and see it act."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from tests.monitoring.test_same_figures import logged, metrics_of
from tests.page.test_page import number, opened, ready
from tests.server.harness import RunningServer, serving, until
from tests.server.model_server import tiny_engine, tiny_loaded

from dflash2.cli import main
from dflash2.monitoring import swap_log

LOAD = ["--sessions", "8", "--concurrency", "8", "--turns", "2", "--prompt-words", "70", "--output-tokens", "12"]


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    """A real model, tiny, in HBM for a third of what is asked at once."""
    loaded = tiny_loaded(max_position_embeddings=2048)
    engine = tiny_engine(loaded, policy={"swap_batch_size": 16}, scheduling={"quantum_tokens": 4})
    with serving(engine, observer=engine.runtime.observer, api_key="s3cret") as server:  # type: ignore[arg-type]
        yield server


def test_pressure_is_seen_in_four_places_and_a_slider_acts(
    server: RunningServer,
    browser: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(swap_log, "INTERVAL_S", 0.2)
    monkeypatch.setenv("DFLASH2_API_KEY", "s3cret")
    caplog.set_level(logging.INFO)
    file = tmp_path / "run.json"
    with ThreadPoolExecutor(1) as elsewhere:  # the browser has this thread's event loop
        argv = ["bench", "--url", server.url, *LOAD, "--ignore-eos", "--json", str(file)]
        assert elsewhere.submit(main, argv).result() == 0
    result = json.loads(file.read_text(encoding="utf-8"))
    assert result["failed"] == 0 and result["output_tokens"] == 8 * 2 * 12
    assert result["server"]["swap_in_blocks"] > 0 and result["server"]["swap_out_blocks"] > 0

    key = {"Authorization": "Bearer s3cret"}
    idle = {"copies_in_flight": 0, "pinned_blocks": 0}
    until(lambda: server.get("/dflash2/stats", headers=key).json().items() >= idle.items())
    counters = server.get("/dflash2/stats", headers=key).json()["counters"]
    until(lambda: logged(caplog.messages)["swap_in_blocks"] == counters["swap_in_blocks"])
    metrics = metrics_of(server.get("/metrics", headers=key).text)
    capsys.readouterr()
    assert main(["top", "--once", "--url", server.url]) == 0
    top = capsys.readouterr().out
    assert server.get("/dflash2/stats").status_code == 401
    with opened(browser, f"{server.url}/dflash2/#token=s3cret") as page:
        ready(page)
        for name, direction in (("swap_in_blocks", "in"), ("swap_out_blocks", "out")):
            count = counters[name]
            assert number(page, "swaps", f"blocks swapped {direction}") == count
            assert re.search(rf"blocks swapped {direction}\s+{count:,}\b", top)
            assert metrics["dflash2_swap_blocks_total", (("direction", direction),)] == count
            assert logged(caplog.messages)[name] == count
        slider = page.locator("#cold_threshold")
        slider.fill("0.25")
        slider.dispatch_event("change")
        page.wait_for_selector("#undo:enabled")
    until(lambda: server.get("/dflash2/stats", headers=key).json()["cold_threshold"] == 0.25)
    assert "cold_threshold changed from 0.8 to 0.25" in caplog.text
