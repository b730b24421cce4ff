"""From a model and a configuration to an engine that runs."""

from __future__ import annotations

from pathlib import Path

from tests.engine.device_case import NEW_TOKENS, answers, tiny_loaded


def test_with_little_hbm_the_answers_are_those_with_ample(tmp_path: Path) -> None:
    loaded = tiny_loaded("cpu")
    ample, unmoved = answers(loaded, tmp_path / "ample", hbm_mb=8)
    short, moved = answers(loaded, tmp_path / "short", hbm_mb=1)
    assert short == ample and {len(answer) for answer in short} == {NEW_TOKENS}
    assert unmoved["preemptions_swapped"] == 0
    assert moved["preemptions_swapped"] > 0 and moved["loaded_from_nvme_blocks"] > 0
    assert moved["failed_copies"] == moved["recomputed_tokens"] == 0
