"""What was freed in small pieces goes back to the system, once the engine has been idle for a while."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager

import psutil
import pytest
from tests.fakes.engine_world import EngineWorld

from dflash2.engine.freed_memory import AFTER_WORK_S, WHILE_IDLE_S, FreedMemory
from dflash2.types import MIB


class Trims:
    """Counts instead of trimming."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, keep_bytes: int) -> int:
        assert keep_bytes == 0
        self.count += 1
        return 1


@contextmanager
def holes(num_bytes: int) -> Iterator[None]:
    """That much freed memory below a piece still in use, which glibc does not give back of its own accord."""
    libc = ctypes.CDLL(None)
    libc.malloc.restype = ctypes.c_void_p
    libc.malloc.argtypes, libc.free.argtypes = [ctypes.c_size_t], [ctypes.c_void_p]
    size = 64 * 1024
    pieces = [libc.malloc(size) for _ in range(num_bytes // size)]
    for piece in pieces:
        ctypes.memset(piece, 1, size)
    last = libc.malloc(size)
    for piece in pieces:
        libc.free(piece)
    yield
    libc.free(last)


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="only glibc can give freed memory back")
def test_the_process_becomes_smaller() -> None:
    process = psutil.Process()
    with holes(128 * MIB):
        before = process.memory_info().rss
        FreedMemory().while_idle(0.0)
        assert before - process.memory_info().rss > 100 * MIB


def test_not_between_requests_and_not_all_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    world = EngineWorld((20, 16, 40))
    trims = Trims()
    monkeypatch.setattr(world.engine._freed_memory, "_trim", trims)
    world.add_random(2)
    while world.engine.has_work:
        world.step()
    world.engine.idle()
    assert trims.count == 0, "the next request may be here in a moment"
    world.clock.advance(AFTER_WORK_S)
    world.engine.idle()
    world.engine.idle()
    assert trims.count == 1
    world.clock.advance(WHILE_IDLE_S)
    world.engine.idle()
    assert trims.count == 2, "other threads free memory too"


def test_where_the_library_cannot_nothing_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda name: object())
    freed = FreedMemory()
    freed.after_step(0.0)
    freed.while_idle(AFTER_WORK_S)
