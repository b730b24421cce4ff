"""The runtime: what an engine talks to. One thread drives it."""

from dflash2.runtime.parts import RuntimeParts
from dflash2.runtime.runtime import POLL_S, Runtime

__all__ = ["POLL_S", "Runtime", "RuntimeParts"]
