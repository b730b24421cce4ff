"""Which stages a request goes through, in a line for the log (R-1.3)."""

from __future__ import annotations

from dflash2.config import Config


def startup_line(config: Config) -> str:
    """Names the active stages and what decides in them."""
    scheduling = config.scheduling
    if not config.enable:
        return "DFlash2: pipeline: validate, tokenise, batch; no reservations, first come, first served"
    stages = ["validate", "tokenise"]
    if config.lora.adapters or config.lora.directory is not None:
        stages.append("adapter")
    if config.pipeline.enabled:
        stages.append("lookup")
    if scheduling.reserve == "estimate":
        stages.append("estimate")
    stages += ["reserved", "batch"]
    notes = [
        "requests that arrive together are tokenised together" if config.pipeline.enabled else "one by one",
        "short requests first" if scheduling.order == "short_first" else "first come, first served",
        f"smoothing of order {scheduling.smoothing_order}" if scheduling.smoothing else "no smoothing",
    ]
    return f"DFlash2: pipeline: {', '.join(stages)}; {'; '.join(notes)}"
