"""Alert rules and dashboard: they parse, they fire when they should, and every metric in them is exported."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from dflash2.monitoring.prometheus import METRICS, PREFIX

DEPLOY = Path(__file__).resolve().parents[2] / "deploy"
SUFFIXES = {"counter": ("_total",), "gauge": ("",), "histogram": ("_bucket", "_sum", "_count")}
EXPORTED = {f"{PREFIX}{series.name}{suffix}": series for series in METRICS for suffix in SUFFIXES[series.kind]}


def metrics_in(text: str) -> set[str]:
    return set(re.findall(rf"\b{PREFIX}\w+", text))


def test_every_metric_of_the_alerts_is_exported() -> None:
    text = (DEPLOY / "prometheus" / "alerts.yml").read_text(encoding="utf-8")
    assert len(metrics_in(text)) > 12 and metrics_in(text) <= set(EXPORTED)


def test_every_metric_and_label_of_the_dashboard_is_exported() -> None:
    dashboard = json.loads((DEPLOY / "grafana" / "dflash2.json").read_text(encoding="utf-8"))
    targets = [target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", ())]
    assert len(targets) > 25
    for expression in targets:
        assert metrics_in(expression) <= set(EXPORTED), expression
        labels = {label for name in metrics_in(expression) for label in EXPORTED[name].labels}
        for group in re.findall(r"(?:by|ignoring) \(([\w, ]+)\)", expression):
            assert set(group.split(", ")) <= labels | {"instance", "le"}, expression


def test_panels_of_the_dashboard_do_not_overlap() -> None:
    panels = json.loads((DEPLOY / "grafana" / "dflash2.json").read_text(encoding="utf-8"))["panels"]
    places = [
        (x, y)
        for place in (panel["gridPos"] for panel in panels)
        for x in range(place["x"], place["x"] + place["w"])
        for y in range(place["y"], place["y"] + place["h"])
    ]
    assert len(set(places)) == len(places) and max(x for x, _ in places) < 24
    assert len({panel["id"] for panel in panels}) == len(panels)


@pytest.mark.parametrize("action", [["check", "rules", "alerts.yml"], ["test", "rules", "alerts_test.yml"]])
def test_promtool_accepts_the_alerts(action: list[str]) -> None:
    program = os.environ.get("DFLASH2_TEST_PROMTOOL") or shutil.which("promtool")
    if program is None:
        pytest.skip("no promtool here: install Prometheus, or name it in DFLASH2_TEST_PROMTOOL")
    result = subprocess.run(
        [program, *action], cwd=DEPLOY / "prometheus", capture_output=True, text=True, timeout=240, check=False
    )
    assert result.returncode == 0, result.stdout + result.stderr
