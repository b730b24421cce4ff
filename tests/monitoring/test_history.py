"""The history: resolutions, restarts, damage, fixed memory."""

from __future__ import annotations

import csv
import io
import json
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dflash2.monitoring import history, history_file
from dflash2.monitoring.curves import CURVES, CurveReader
from dflash2.monitoring.history import NAMES, SAVE_INTERVAL_S, SPANS, History

START = 1_800_000_000.0


class World:
    """A history, its clock, and the statistics it sees."""

    def __init__(self, path: Path | None = None, start: float = START) -> None:
        self.now = start
        self.stats: dict[str, Any] = {"counters": {"swap_in_bytes": 0}, "tiers": {"hbm": {"used_blocks": 0}}}
        self.num_taken = 0
        self.history = History(path, wall=lambda: self.now)

    def take(self) -> dict[str, Any]:
        self.num_taken += 1
        return json.loads(json.dumps(self.stats))

    def run(self, seconds: int, bytes_per_s: int = 0) -> None:
        for _ in range(seconds):
            self.history.step(self.take)
            self.now += 1.0
            self.stats["counters"]["swap_in_bytes"] += bytes_per_s

    def series(self, name: str, span: str = "10m") -> list[float | None]:
        return self.history.curves(span)["series"][name]


def test_names_are_unique_and_say_their_unit() -> None:
    assert len(set(NAMES)) == len(CURVES)
    for name in NAMES:
        assert name.endswith(("_blocks", "_bytes", "_per_s", "_ratio", "_seconds", "_threshold")) or "requests" in name


def test_one_sample_a_second_however_often_it_is_called() -> None:
    world = World()
    for _ in range(50):
        world.history.step(world.take)
        world.now += 0.1
    assert world.num_taken == 5


def test_levels_rates_and_shares() -> None:
    reader = CurveReader()
    column = {name: NAMES.index(name) for name in NAMES}
    stats = {"tiers": {"hbm": {"used_blocks": 7}}, "counters": {"swap_in_bytes": 100, "used_blocks": 10}}
    first = reader.row(stats, 1.0)
    assert first[column["hbm_used_blocks"]] == 7 and np.isnan(first[column["swap_in_bytes_per_s"]])
    grown = {"swap_in_bytes": 300, "used_blocks": 30, "used_in_hbm_blocks": 15}
    second = reader.row({**stats, "counters": grown}, 3.0)
    assert second[column["swap_in_bytes_per_s"]] == 100
    assert second[column["hbm_hit_ratio"]] == 0.75
    third = reader.row({**stats, "counters": grown}, 4.0)
    assert third[column["swap_in_bytes_per_s"]] == 0 and np.isnan(third[column["hbm_hit_ratio"]])
    earlier = reader.row(stats, 2.0)
    assert np.isnan(earlier[column["swap_in_bytes_per_s"]]), "a clock that was set back gives no rate"


def test_each_span_has_its_resolution_and_means() -> None:
    world = World()
    world.run(30, bytes_per_s=100)
    world.run(31, bytes_per_s=300)
    assert len(world.series("swap_in_bytes_per_s")) == 61
    assert world.series("swap_in_bytes_per_s")[0] is None
    assert world.series("swap_in_bytes_per_s", "3h")[:6] == pytest.approx([100, 100, 100, 280, 300, 300], abs=1)
    assert world.series("swap_in_bytes_per_s", "3d")[0] == pytest.approx((30 * 100 + 29 * 300) / 59, rel=1e-5)
    assert world.history.curves("3h")["times"][:2] == [START, START + 10]


def test_memory_is_fixed_and_old_points_go() -> None:
    world = World()
    before = world.history.num_bytes
    assert before < 2 << 20
    world.run(700)
    assert world.history.num_bytes == before
    times = world.history.curves("10m")["times"]
    assert len(times) == 599 and times[-1] == world.now - 1
    world.now += 3 * 86_400
    assert world.history.curves("3d")["times"] == []


def test_it_survives_a_restart_with_a_gap(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "history"
    world = World(path)
    world.run(20, bytes_per_s=50)
    world.history.close()
    again = World(path, start=world.now + 100)
    again.run(5)
    times = again.history.curves("10m")["times"]
    assert len(times) == 25 and times[20] - times[19] == 101
    assert again.series("swap_in_bytes_per_s")[5] == 50
    assert again.series("swap_in_bytes_per_s")[20] is None, "no rate across a restart"
    assert path.stat().st_mode & 0o777 == 0o600
    assert [file.name for file in path.parent.iterdir()] == ["history"]


def test_it_is_saved_every_minute(tmp_path: Path) -> None:
    world = World(tmp_path / "history")
    world.run(int(SAVE_INTERVAL_S))
    assert not (tmp_path / "history").exists()
    world.run(1)
    thread = world.history._saving
    assert thread is not None
    thread.join()
    assert World(tmp_path / "history", start=world.now).history.curves("10m")["times"]


def test_a_save_that_hangs_is_not_joined_by_another_at_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    released, writers = threading.Event(), []

    def hang(*_: object) -> None:
        writers.append(threading.current_thread())
        assert released.wait(60)

    monkeypatch.setattr(history, "write_history", hang)
    monkeypatch.setattr(history, "CLOSE_WAIT_S", 0.05, raising=False)
    world = World(tmp_path / "history")
    world.run(int(SAVE_INTERVAL_S) + 1)
    closing = threading.Thread(target=world.history.close)
    closing.start()
    closing.join(20)
    done = not closing.is_alive()
    released.set()
    closing.join()
    assert writers == [world.history._saving]
    assert done and "hangs" in caplog.text


@pytest.mark.parametrize("damage", ["cut", "flipped", "version", "empty"])
def test_a_file_that_cannot_be_trusted_is_not_used(
    damage: str, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "history"
    world = World(path)
    world.run(5)
    if damage == "version":
        monkeypatch.setattr(history_file, "VERSION", 2)
    world.history.close()
    monkeypatch.undo()
    data = bytearray(path.read_bytes())
    if damage == "flipped":
        data[len(data) // 2] ^= 1
    path.write_bytes({"cut": data[:-100], "empty": b""}.get(damage, data))
    assert World(path, start=world.now).history.curves("10m")["times"] == []
    assert "starts anew" in caplog.text


def test_a_curve_that_is_new_has_no_past_and_the_others_keep_theirs(tmp_path: Path) -> None:
    class Rings:
        resolution_s = 1

        def __init__(self, names: int) -> None:
            self.ticks = np.arange(1, 4)
            self.values = np.full((3, names), np.nan, np.float32)

    old, new = Rings(2), Rings(3)
    old.values[:] = [[1, 2]] * 3
    history_file.write_history(tmp_path / "h", ["gone", "kept"], [old])
    history_file.read_history(tmp_path / "h", ["new", "kept", "newer"], [new])
    assert new.values[:, 1].tolist() == [2, 2, 2] and np.isnan(new.values[:, [0, 2]]).all()


def test_a_folder_that_cannot_be_written_is_said_and_survived(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("")
    world = World(tmp_path / "file" / "history")
    world.run(3)
    world.history.close()
    assert "kept in memory" in caplog.text


def test_csv_has_a_column_for_each_curve() -> None:
    world = World()
    world.run(3, bytes_per_s=5)
    rows = list(csv.DictReader(io.StringIO("".join(world.history.csv("10m")))))
    assert list(rows[0]) == ["time", *NAMES]
    assert [row["swap_in_bytes_per_s"] for row in rows] == ["", "5", "5"]
    assert [int(row["time"]) for row in rows] == [START, START + 1, START + 2]


def test_the_spans_are_those_that_are_documented() -> None:
    assert {span: step * points for span, (step, points) in SPANS.items()} == {
        "10m": 600,
        "3h": 3 * 3600,
        "3d": 3 * 86_400,
    }
