"""The page's data, `dflash2 top`, the log and /metrics tell the same story."""

from __future__ import annotations

import logging
import re
from collections import Counter
from pathlib import Path

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families
from tests.monitoring.live import living

from dflash2.cli import main
from dflash2.monitoring import swap_log
from dflash2.monitoring.standalone import MonitorServer

IN_TOP = {
    "swap_in_blocks": "blocks swapped in",
    "swap_out_blocks": "blocks swapped out",
    "failed_copies": "failed copies",
}
IN_METRICS = {
    "swap_in_blocks": ("dflash2_swap_blocks_total", {"direction": "in"}),
    "swap_out_blocks": ("dflash2_swap_blocks_total", {"direction": "out"}),
    "demoted_to_nvme_blocks": ("dflash2_nvme_demoted_blocks_total", {}),
    "loaded_from_nvme_blocks": ("dflash2_nvme_loaded_blocks_total", {}),
    "failed_copies": ("dflash2_failed_copies_total", {}),
    "recomputed_tokens": ("dflash2_recomputed_tokens_total", {}),
}


def metrics_of(text: str) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    families = text_string_to_metric_families(text)
    return {(s.name, tuple(sorted(s.labels.items()))): s.value for family in families for s in family.samples}


def test_four_views_of_the_same_traffic(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(swap_log, "INTERVAL_S", 0.2)
    caplog.set_level(logging.INFO)
    with living(tmp_path) as live:
        live.until(lambda: live.runtime.cache.counters.loaded_from_nvme_blocks > 50)
        live.hold_still()
        server = MonitorServer(live.runtime.observer)
        page = httpx.get(server.url + "stats", timeout=240).json()["counters"]
        metrics = metrics_of(httpx.get(server.url.replace("dflash2/", "metrics"), timeout=240).text)
        assert main(["top", "--once", "--url", server.url]) == 0
        top = capsys.readouterr().out
        live.until(lambda: logged(caplog.messages)["swap_out_blocks"] == page["swap_out_blocks"])
        server.close()
    log = logged(caplog.messages)
    for name, (metric, labels) in IN_METRICS.items():
        assert metrics[metric, tuple(labels.items())] == page[name] == log[name], name
    assert page["swap_in_blocks"] > 0 and page["demoted_to_nvme_blocks"] > 0
    for name, words in IN_TOP.items():
        assert re.search(rf"{words}\s+{page[name]:,}\b", top), name


def logged(messages: list[str]) -> Counter[str]:
    """What all swap lines together say."""
    total: Counter[str] = Counter()
    for line in messages:
        if line.startswith("dflash2_swap "):
            total.update({name: int(count) for name, count in re.findall(r"(\w+)=\+(\d+)", line)})
    return total
