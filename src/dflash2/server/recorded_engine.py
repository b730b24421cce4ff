"""An engine whose traffic is recorded."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing

from dflash2.engine.async_engine import AsyncEngine
from dflash2.engine.base import Engine, GenerationRequest, TokenOutput
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
            self._recorder.finish(request.request_id, num_output, reason)
