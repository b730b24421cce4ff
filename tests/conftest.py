"""What all tests share: a fixed environment, the real model's path, the scale of long tests."""

from __future__ import annotations

import os
from pathlib import Path

# Before anything imports torch or transformers: threads that spin make two processes on two cores crawl.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import pytest
from hypothesis import settings

_SCALE = int(os.environ.get("DFLASH2_TEST_SCALE", "1"))

# The same examples on every run, so that a red run can be repeated; the long run looks further. No example has a
# deadline: no test judges a time.
settings.register_profile("dflash2", deadline=None, derandomize=_SCALE == 1, max_examples=100 * _SCALE)
settings.load_profile("dflash2")


@pytest.fixture(scope="session")
def test_scale() -> int:
    """How far long tests go: 1 is the seeded tenth that every run does, 10 the whole."""
    return _SCALE


@pytest.fixture
def short_bursts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bursts are of ``swap_batch_size`` blocks however small these are, so that tiny ones go in several as well."""
    from dflash2.transfer import base

    monkeypatch.setattr(base, "LEAST_BURST_BYTES", 0)


@pytest.fixture(scope="session")
def model_path() -> Path:
    """The real model's .gguf file, named by DFLASH2_TEST_MODEL (``make test`` fetches it and sets this)."""
    value = os.environ.get("DFLASH2_TEST_MODEL", "")
    if not value:
        pytest.fail("DFLASH2_TEST_MODEL is not set: run `make test`, or name a .gguf file in it", pytrace=False)
    path = Path(value)
    if not path.is_file():
        pytest.fail(f"DFLASH2_TEST_MODEL names {path}, which is not a file", pytrace=False)
    return path
