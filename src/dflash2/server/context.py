"""What every route needs, put together once."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from dflash2.config import PipelineConfig, SchedulingConfig
from dflash2.engine.adapters import Adapters
from dflash2.engine.async_engine import AsyncEngine
from dflash2.monitoring.observer import Observer
from dflash2.server.generation import Frontend
from dflash2.server.traffic import HttpTraffic
from dflash2.types import MIB


@dataclass(frozen=True, slots=True)
class ServerSettings:
    """How the server presents itself and what it accepts.

    Attributes:
        model_names: names that requests may use; all mean the one model that is loaded.
        api_key: if set, every route but ``/health`` asks for ``Authorization: Bearer <key>``.
        max_body_bytes: larger bodies get 413.
        body_timeout_s: a body must have arrived by then.
        shutdown_grace_s: how long running requests may go on when the server is told to stop.
        pipeline: how requests are made ready.
        admission_timeout_s: so long a prompt may wait for room between tokenizer and engine.
    """

    model_names: tuple[str, ...]
    api_key: str | None = None
    max_body_bytes: int = 8 * MIB
    body_timeout_s: float = 60.0
    shutdown_grace_s: float = 30.0
    pipeline: PipelineConfig = field(default_factory=PipelineConfig)
    admission_timeout_s: float = SchedulingConfig().admission_timeout_s


@dataclass(frozen=True, slots=True)
class ServerContext:
    """The parts of one running server."""

    settings: ServerSettings
    engine: AsyncEngine
    frontend: Frontend
    traffic: HttpTraffic = field(default_factory=HttpTraffic)
    adapters: Adapters | None = None
    """LoRA adapters of the engine; only its thread may use more than the registry."""
    observer: Observer | None = None
    """Of the engine's runtime; without it the page has figures but neither blocks nor policy."""
    created: int = field(default_factory=lambda: int(time.time()))
    """Unix time of start, shown as the models' creation time."""
