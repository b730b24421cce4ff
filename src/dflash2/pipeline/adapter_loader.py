"""One thread that reads adapters from disk and copies them to the device."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable
from functools import partial
from queue import Empty, SimpleQueue
from threading import Thread

from dflash2.pipeline.adapter_cache import Loaded, Work
from dflash2.pipeline.adapter_file import AdapterSpec, AdapterWeights, read_weights

logger = logging.getLogger(__name__)


class ThreadLoader:
    """See ``AdapterLoader``.

    Args:
        fill_slot: copies weights to a slot of the device; called in the thread.
    """

    def __init__(self, fill_slot: Callable[[int, AdapterWeights], None]) -> None:
        self._fill_slot = fill_slot
        self._asked: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._done: deque[Loaded] = deque()
        # A daemon: a file system that hangs must not keep the process from ending.
        self._thread = Thread(target=self._work, name="dflash2-adapters", daemon=True)
        self._thread.start()

    def read(self, spec: AdapterSpec) -> None:
        self._asked.put(partial(self._run, spec.digest, Work.READ, partial(read_weights, spec)))

    def fill(self, spec: AdapterSpec, weights: AdapterWeights, slot: int) -> None:
        self._asked.put(partial(self._run, spec.digest, Work.FILL, partial(self._fill_slot, slot, weights)))

    def poll(self) -> Iterable[Loaded]:
        while self._done:
            yield self._done.popleft()

    def close(self, timeout_s: float) -> None:
        try:
            while True:
                self._asked.get_nowait()
        except Empty:
            self._asked.put(None)
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            logger.error("reading an adapter does not end; gave up waiting after %.0f s", timeout_s)

    def _work(self) -> None:
        while (job := self._asked.get()) is not None:
            job()

    def _run(self, digest: str, work: Work, do: Callable[[], AdapterWeights | None]) -> None:
        try:
            self._done.append(Loaded(digest, work, weights=do()))
        except Exception as error:  # noqa: BLE001 - told to the requests that wait for the adapter
            self._done.append(Loaded(digest, work, error=error))
