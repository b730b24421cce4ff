"""What an adapter that cannot be read or that hangs means to those who come later."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable
from pathlib import Path

import pytest

from dflash2.errors import ModelError
from dflash2.pipeline.adapter_cache import AdapterCache, Loaded, Work
from dflash2.pipeline.adapter_file import AdapterSpec, AdapterWeights
from dflash2.pipeline.adapter_loader import ThreadLoader

SPEC = AdapterSpec("a", Path("/none"), "digest", {}, 100, 100)


class ScriptedLoader:
    """Ends what was asked at the next poll."""

    def __init__(self) -> None:
        self.error: Exception | None = None
        self._ended: list[Loaded] = []

    def read(self, spec: AdapterSpec) -> None:
        self._ended.append(Loaded(spec.digest, Work.READ, weights={}, error=self.error))

    def fill(self, spec: AdapterSpec, weights: AdapterWeights, slot: int) -> None:
        self._ended.append(Loaded(spec.digest, Work.FILL))

    def poll(self) -> Iterable[Loaded]:
        ended, self._ended = self._ended, []
        return ended

    def close(self, timeout_s: float) -> None:
        self._ended.clear()


def test_a_failure_is_not_kept_for_those_who_come_after_all_that_waited_have_left() -> None:
    loader = ScriptedLoader()
    cache = AdapterCache(1, 1000, loader)
    loader.error = OSError("the disk was away")
    cache.want(SPEC, 0.0)
    cache.want(SPEC, 0.0)
    cache.poll(1.0)
    cache.unwant(SPEC)
    with pytest.raises(ModelError, match="the disk was away"):
        cache.try_pin(SPEC)

    cache.want(SPEC, 2.0)
    cache.poll(3.0)
    cache.unwant(SPEC)  # the only one that waited, and it leaves untold
    loader.error = None
    cache.want(SPEC, 4.0)
    for now in (5.0, 6.0, 7.0):
        cache.poll(now)
    assert cache.try_pin(SPEC) == 0
    cache.check_integrity()


def test_an_end_does_not_wait_for_what_hangs(caplog: pytest.LogCaptureFixture) -> None:
    begun, let_go = threading.Event(), threading.Event()

    def hang(slot: int, weights: AdapterWeights) -> None:
        begun.set()
        let_go.wait(240)

    loader = ThreadLoader(hang)
    loader.fill(SPEC, {}, 0)
    loader.fill(SPEC, {}, 1)
    assert begun.wait(240)
    with caplog.at_level(logging.ERROR):
        loader.close(timeout_s=0.05)
    assert "does not end" in caplog.text
    let_go.set()
    loader.close(timeout_s=240)
    assert [done.work for done in loader.poll()] == [Work.FILL], "what had not begun is not done any more"
