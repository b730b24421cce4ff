"""Layer-wise loading: attention of the first layer does not wait for the last."""

from __future__ import annotations

from sglang.srt.mem_cache.unified_cache.unified_cache_linker import LayerWiseLoadCounter


class CounterWatcher:
    """Passes on to SGLang's counter which layers of a load have arrived.

    The last layer counts only when the whole job has ended well: whatever goes wrong before, SGLang sees a failed load
    and never uses what was computed from it.
    """

    def __init__(self, counter: LayerWiseLoadCounter, index: int) -> None:
        self._counter = counter
        self._index = index

    def arrived(self, layer: int) -> None:
        """See ``LayerWatcher``."""
        if layer < self._counter.num_layers - 1:
            self._counter.complete(self._index, layer)

    def ended(self, ok: bool) -> None:
        """See ``LayerWatcher``."""
        if ok:
            self._counter.complete(self._index, self._counter.num_layers - 1)
        else:
            self._counter.fail(self._index, RuntimeError("a load from DRAM to the device failed"))
