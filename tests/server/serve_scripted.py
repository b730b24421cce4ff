"""``dflash2 serve`` with a scripted engine in place of the real one, for tests that need a process of its own.

The model's name says how the engine behaves: ``echo``, ``slow`` or ``breaks``.
"""

from __future__ import annotations

import sys
import types
from dataclasses import dataclass
from typing import Any

from tests.engine.fake_engine import FakeEngine, echo, says
from tests.pipeline.tiny_tokenizer import tiny_hf_tokenizer

from dflash2.cli import main
from dflash2.config import Config


@dataclass
class ScriptedRuntime:
    config: Config
    observer: None = None

    def startup_line(self) -> str:
        return f"DFlash2: started, enable {self.config.enable}, adapters {self.config.lora.adapters}"


@dataclass
class ScriptedEngine(FakeEngine):
    runtime: Any = None
    adapters: None = None


def create_engine(model: str, config: Config, dtype: str, max_context: int | None, device: str) -> ScriptedEngine:
    print(f"loading {model} {dtype} {max_context} {device}", flush=True)
    return ScriptedEngine(
        script=says(97, RuntimeError("device lost")) if model == "breaks" else echo,
        max_context_tokens=max_context or 10**6,
        step_s=0.002 if model == "slow" else 0.0,
        runtime=ScriptedRuntime(config),
    )


def module(name: str, **content: object) -> None:
    """Put a module in place of a real one, before that is imported."""
    sys.modules[name] = types.ModuleType(name)
    vars(sys.modules[name]).update(content)


if __name__ == "__main__":
    module("dflash2.engine.factory", create_engine=create_engine)
    module("dflash2.engine.model_loader", load_tokenizer=lambda model: tiny_hf_tokenizer())
    sys.exit(main(sys.argv[1:]))
