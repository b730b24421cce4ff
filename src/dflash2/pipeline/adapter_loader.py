"""One thread that reads adapters from disk and copies them to the device."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from dflash2.pipeline.adapter_cache import Loaded, Work
from dflash2.pipeline.adapter_file import AdapterSpec, AdapterWeights, read_weights


class ThreadLoader:
    """See ``AdapterLoader``.

    Args:
        fill_slot: copies weights to a slot of the device; called in the thread.
    """

    def __init__(self, fill_slot: Callable[[int, AdapterWeights], None]) -> None:
        self._fill_slot = fill_slot
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="dflash2-adapters")
        self._done: deque[Loaded] = deque()

    def read(self, spec: AdapterSpec) -> None:
        self._thread.submit(self._run, spec.digest, Work.READ, partial(read_weights, spec))

    def fill(self, spec: AdapterSpec, weights: AdapterWeights, slot: int) -> None:
        self._thread.submit(self._run, spec.digest, Work.FILL, partial(self._fill_slot, slot, weights))

    def poll(self) -> Iterable[Loaded]:
        while self._done:
            yield self._done.popleft()

    def close(self) -> None:
        self._thread.shutdown(wait=True, cancel_futures=True)

    def _run(self, digest: str, work: Work, do: Callable[[], AdapterWeights | None]) -> None:
        try:
            self._done.append(Loaded(digest, work, weights=do()))
        except Exception as error:  # noqa: BLE001 - told to the requests that wait for the adapter
            self._done.append(Loaded(digest, work, error=error))
