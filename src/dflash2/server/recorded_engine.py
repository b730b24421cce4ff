"""An engine whose traffic is recorded."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing

from dflash2.engine.async_engine import AsyncEngine
from dflash2.engine.base import Engine, FinishReason, GenerationRequest, TokenOutput
from dflash2.monitoring.recording import TrafficRecorder


class RecordedEngine(AsyncEngine):
    """Tells the recorder of every request that the engine takes and of its end, however it ends.

    Args:
        engine: see ``AsyncEngine``.
        recorder: called from the loop's thread; closed by whoever made it.
    """

    def __init__(self, engine: Engine, recorder: TrafficRecorder) -> None:
        super().__init__(engine)
        self._recorder = recorder
        self._stopped: set[str] = set()
        """Requests of which an answer was ended by its reader."""

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[TokenOutput, None]:
        """See ``AsyncEngine.generate``."""
        scope = (request.adapter, request.tenant_salt)
        self._recorder.arrival(request.request_id, request.token_ids, scope, request.hints.session_id)
        num_output, reason = 0, None
        try:
            async with aclosing(super().generate(request)) as outputs:
                async for output in outputs:
                    num_output += output.token_id is not None
                    if output.finish_reason is not None and output.error is None:
                        reason = output.finish_reason.value
                    yield output
        finally:
            if request.request_id in self._stopped:
                self._stopped.discard(request.request_id)
                reason = reason or FinishReason.STOP.value
            self._recorder.finish(request.request_id, num_output, reason)

    def end_answer(self, request_id: str, index: int) -> None:
        """See ``AsyncEngine.end_answer``."""
        self._stopped.add(request_id)
        super().end_answer(request_id, index)
