"""The web routes: who may ask, what is answered, and that what is wrong changes nothing."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.monitoring.live import Live, living

from dflash2.errors import ConfigError, DFlash2Error
from dflash2.monitoring import view
from dflash2.monitoring.standalone import MonitorServer


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    with living(tmp_path_factory.mktemp("nvme"), history_enabled=True) as live:
        live.until(lambda: live.num_turns > 10)
        yield live


@pytest.fixture(scope="module")
def http(live: Live) -> Iterator[httpx.Client]:
    server = MonitorServer(live.runtime.observer)
    with httpx.Client(base_url=server.url, timeout=240) as client:
        yield client
    server.close()


def test_the_page_and_its_parts(http: httpx.Client) -> None:
    page = http.get("")
    assert page.status_code == 200 and page.headers["content-type"] == "text/html; charset=utf-8"
    assert "frame-ancestors 'none'" in page.headers["content-security-policy"]
    assert http.get("main.js").headers["content-type"] == "text/javascript; charset=utf-8"
    for missing in ("absent.js", "../view.py", "%2e%2e/view.py", "page/index.html"):
        assert http.get(missing).status_code == 404
    redirect = http.get(str(http.base_url).rstrip("/"), follow_redirects=False)
    assert redirect.status_code == 307 and redirect.headers["location"] == "/dflash2/"


def test_the_page_asks_no_other_host() -> None:
    folder = Path(view.__file__).parent / "page"
    for file in folder.iterdir():
        text = file.read_text(encoding="utf-8").replace("http://www.w3.org/2000/svg", "")
        assert "http://" not in text and "https://" not in text and "innerHTML" not in text, file.name


def test_statistics(http: httpx.Client) -> None:
    stats = http.get("stats").json()
    assert stats["counters"]["swap_out_blocks"] > 0 and stats["history_enabled"] is True
    assert stats["disk"]["free_bytes"] > 0 and stats["policy"]["cold_threshold"] == 0.8
    assert "dflash2_nvme_disk_free_bytes " in http.get(str(http.base_url).replace("dflash2/", "metrics")).text


def test_blocks(http: httpx.Client, live: Live) -> None:
    report = http.get("blocks", params={"count": 3}).json()
    assert len(report["hottest"]) == len(report["coldest"]) == 3
    heats = [block["heat"] for block in report["coldest"] + report["hottest"][::-1]]
    assert heats == sorted(heats)
    assert sum(map(sum, report["histogram"].values())) == report["num_blocks"]
    assert all(block["why"] for block in report["hottest"])
    for count in ("0", "101", "x", "-1"):
        assert http.get("blocks", params={"count": count}).status_code == 400


def test_history(http: httpx.Client, live: Live) -> None:
    live.until(lambda: len(http.get("history").json()["times"]) > 1)
    assert http.get("history", params={"span": "1y"}).status_code == 400
    csv = http.get("history.csv", params={"span": "3h"})
    assert csv.headers["content-disposition"] == 'attachment; filename="dflash2-3h.csv"'


def test_policy_changes_and_undo(http: httpx.Client, live: Live) -> None:
    state = http.post("policy", json={"cold_threshold": 0.5, "prefetch_window": 4}).json()
    assert state["values"]["cold_threshold"] == live.runtime.config.policy.cold_threshold == 0.5
    assert [change["after"] for change in state["changes"]] == [{"cold_threshold": 0.5}], "4 was the value before"
    http.post("policy", json={"swap_batch_size": 2, "cold_threshold": 0.6})
    assert http.get("policy").json()["limits"]["swap_batch_size"] == [1, 8]
    assert http.post("policy/undo", json={}).json()["values"]["swap_batch_size"] == 8
    state = http.post("policy/undo", json={}).json()
    assert state["values"]["cold_threshold"] == 0.8 and state["changes"] == []
    assert http.post("policy/undo", json={}).json()["values"]["cold_threshold"] == 0.8


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"cold_threshold": 2}, "out of range"),
        ({"cold_threshold": "0.5"}, "write it without quotes"),
        ({"swap_batch_size": 9}, "at most 8"),
        ({"enable": False}, "cannot be changed while running"),
    ],
)
def test_what_is_not_valid_changes_nothing(body: dict[str, Any], words: str, http: httpx.Client, live: Live) -> None:
    before = live.runtime.config
    answer = http.post("policy", json=body)
    assert answer.status_code == 400 and (words in answer.json()["detail"] or words.startswith("write"))
    assert live.runtime.config == before


@pytest.mark.parametrize(
    ("headers", "content", "status"),
    [
        ({"Content-Type": "text/plain"}, b"{}", 415),
        ({"Content-Type": "application/json"}, b"{", 400),
        ({"Content-Type": "application/json"}, b"[]", 400),
        ({"Content-Type": "application/json"}, b" " * 20_000 + b"{}", 413),
    ],
)
def test_bodies_that_are_refused(headers: dict[str, str], content: bytes, status: int, http: httpx.Client) -> None:
    assert http.post("policy", headers=headers, content=content).status_code == status


def test_another_site_that_points_here_gets_no_data(http: httpx.Client) -> None:
    assert http.get("stats", headers={"Host": "evil.example"}).status_code == 403
    assert http.get("stats", headers={"Host": "localhost:1"}).status_code == 200


def test_with_a_token_data_needs_it_and_the_page_does_not(live: Live) -> None:
    server = MonitorServer(live.runtime.observer, token="s3cret")
    with httpx.Client(base_url=server.url, timeout=240) as client:
        assert client.get("").status_code == 200
        for path in ("stats", "blocks", "policy", "history", "history.csv", "../metrics"):
            assert client.get(httpx.URL(server.url).join(path)).status_code == 401, path
        assert client.post("policy", json={"cold_threshold": 0.1}).status_code == 401
        for header, status in (("Bearer wrong", 401), ("s3cret", 401), ("Bearer s3cret", 200)):
            assert client.get("stats", headers={"Authorization": header}).status_code == status
    server.close()
    assert live.runtime.config.policy.cold_threshold == 0.8


def test_an_open_address_needs_a_token(live: Live) -> None:
    with pytest.raises(ConfigError, match="token"):
        MonitorServer(live.runtime.observer, host="0.0.0.0")


def test_a_taken_address_is_an_error(live: Live) -> None:
    server = MonitorServer(live.runtime.observer)
    with pytest.raises(DFlash2Error, match="cannot show the page"):
        MonitorServer(live.runtime.observer, port=int(server.url.rsplit(":", 1)[1].split("/")[0]))
    server.close()


def test_a_runtime_that_does_not_answer_is_503(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(view, "ANSWER_TIMEOUT_S", 0.2)
    with living(tmp_path) as live:
        live.stopping.set()
        live._thread.join()
        server = MonitorServer(live.runtime.observer)
        for path in ("stats", "blocks", "policy"):
            answer = httpx.get(server.url + path, timeout=240)
            assert answer.status_code == 503 and "no answer" in json.dumps(answer.json())
        assert httpx.get(server.url + "history", timeout=240).status_code == 404
        server.close()
