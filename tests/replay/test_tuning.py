from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.replay.small_trace import SMALL_TRACE

from dflash2.cli import main
from dflash2.config import Config, load_config
from dflash2.replay.tuning import Outcome, best_of, search, trade_off

GB = 1e9
MEMORY = {"hbm_capacity_mb": 100, "dram_capacity_mb": 200, "nvme_capacity_mb": 800}
BASE = Config.model_validate({"enable": True, "memory": MEMORY})


def outcome(hits: float, gb_per_hour: float, ttft_s: float) -> Outcome:
    return Outcome(BASE, hits, gb_per_hour * GB, ttft_s, ttft_s)


def made_up(config: Config) -> Outcome:
    """Hits grow with DRAM; writes grow with the threshold; time is best at 0.6."""
    threshold = config.policy.cold_threshold
    dram = config.memory.dram_capacity_mb or 0
    return Outcome(config, dram / 1000, threshold * GB, 1 + abs(threshold - 0.6) - dram / 1000, 2.0)


def test_the_search_begins_with_what_is_and_gets_nearer() -> None:
    outcomes = search(made_up, BASE, 40)
    assert len(outcomes) == 40
    assert outcomes[0].config == BASE
    best = best_of(outcomes)
    assert abs(best.config.policy.cold_threshold - 0.6) < 0.1 and best.config.memory.dram_capacity_mb == 200
    assert best.ttft_mean_s < outcomes[0].ttft_mean_s


def test_the_search_stays_within_the_budget_and_leaves_everything_else() -> None:
    base = BASE.model_copy(update={"policy": BASE.policy.model_copy(update={"low_watermark": 0.7})})
    for one in search(made_up, base, 20):
        memory = one.config.memory
        assert memory.dram_capacity_mb is not None and memory.dram_capacity_mb <= 200
        assert memory.nvme_capacity_mb <= 800 and memory.hbm_capacity_mb == 100
        assert 0.3 <= one.config.policy.cold_threshold <= 0.99
        assert one.config.enable


def test_the_same_seed_searches_alike() -> None:
    first, second, other = (search(made_up, BASE, 12, seed=seed) for seed in (3, 3, 4))
    assert [one.config for one in first] == [one.config for one in second] != [one.config for one in other]


def test_trials_at_the_same_time_find_something_good_too() -> None:
    outcomes = search(made_up, BASE, 7, jobs=2)
    assert len(outcomes) == 7 and outcomes[0].config == BASE
    assert all(one == made_up(one.config) for one in outcomes)


def test_the_best_is_fast_first_and_then_spares_the_disk() -> None:
    fast, near, slow = outcome(0.5, 90, 1.0), outcome(0.5, 40, 1.009), outcome(0.5, 1, 1.5)
    assert best_of([fast, near, slow]) is near
    assert best_of([fast, near, slow], max_nvme_bytes_per_hour=10 * GB) is slow
    assert best_of([fast, near], max_nvme_bytes_per_hour=10 * GB) is near  # nothing keeps to it: the fewest writes


def test_the_trade_off_leaves_out_what_is_worse_in_everything() -> None:
    fast, cheap, worse, again = (
        outcome(0.5, 90, 1.0),
        outcome(0.4, 1, 1.5),
        outcome(0.4, 91, 1.1),
        outcome(0.5, 90, 1.0),
    )
    assert trade_off([worse, cheap, fast, again]) == [fast, cheap]


def test_the_command_writes_a_configuration_that_loads(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MPLCONFIGDIR", str(tmp_path))
    base, output, plot = tmp_path / "base.json", tmp_path / "tuned.json", tmp_path / "t.png"
    base.write_text(json.dumps({"enable": True, "memory": MEMORY}))
    arguments = [*("tune", str(SMALL_TRACE), "--config", str(base), "--trials", "3", "--upto", "120")]
    arguments += ["--bytes-per-token", "2048", "--output", str(output), "--plot", str(plot)]
    assert main([*arguments, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert len(report["trials"]) == 3 and report["best"] in report["trials"]
    assert load_config(output).model_dump(exclude_unset=True, exclude_none=True) == report["best"]["config"]
    assert plot.read_bytes().startswith(b"\x89PNG")
    assert main(arguments) == 1
    printed = capsys.readouterr()
    assert "settings tried" in printed.out and "--force overwrites it" in printed.err


def test_capacities_must_be_given(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base = tmp_path / "base.json"
    base.write_text('{"enable": true}')
    assert main(["tune", str(SMALL_TRACE), "--config", str(base), "--trials", "1"]) == 2
    assert "memory.hbm_capacity_mb" in capsys.readouterr().err
