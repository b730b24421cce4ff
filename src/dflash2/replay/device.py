"""What a machine takes to load and to compute, for modelled times."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dflash2.errors import ConfigError
from dflash2.replay.events import Timing

_SPEEDS = {
    "dram_to_hbm": "dram_to_hbm_bytes_per_s",
    "nvme_read": "nvme_read_bytes_per_s",
    "prefill_tokens_per_s": "prefill_tokens_per_s",
    "first_token_s": "first_token_s",
    "decode_tokens_per_s": "decode_tokens_per_s",
    "admission_s": "admission_s",
    "prefill_doubles_at": "prefill_doubles_at_tokens",
    "block_bytes": "block_bytes",
}


@dataclass(frozen=True, slots=True)
class DeviceModel:
    """Speeds of one rank. Defaults are an assumption: PCIe 4.0 x16, one NVMe disk for each rank, a 72B model on eight.

    Attributes:
        dram_to_hbm: bytes per second.
        nvme_read: bytes per second.
        prefill_tokens_per_s: tokens of a prompt computed per second.
        first_token_s: when the first token of a request comes, for the time at which it ends; None: see ``Timing``.
        decode_tokens_per_s: pace of one request's output, for the same purpose.
        admission_s: from arrival until a request may run: tokenising, and waiting for its turn.
        prefill_doubles_at: position of a token that takes twice as long as the first one, since attention looks at all
            before it: six times the hidden size in a usual model. Infinite: all take the same.
        block_bytes: size of a block, where the profile tells it.
    """

    dram_to_hbm: float = 24e9
    nvme_read: float = 6e9
    prefill_tokens_per_s: float = 8000.0
    first_token_s: float | None = None
    decode_tokens_per_s: float | None = None
    admission_s: float = 0.5
    prefill_doubles_at: float = math.inf
    block_bytes: int | None = None

    def ttft_s(self, hits: tuple[int, int, int], prompt_tokens: int, block_tokens: int, block_bytes: int) -> float:
        """Loads from DRAM and NVMe, then the computation of what was not found (at least one token).

        Args:
            hits: blocks found in HBM, DRAM and NVMe.
            prompt_tokens: of the request.
            block_tokens: of one block.
            block_bytes: of one block.
        """
        _, dram, nvme = hits
        load = dram * block_bytes / self.dram_to_hbm + nvme * block_bytes / self.nvme_read
        found = min(sum(hits) * block_tokens, prompt_tokens - 1)
        missing = prompt_tokens - found
        deeper = 0.5 * missing * (found + prompt_tokens - 1) / self.prefill_doubles_at
        return load + (missing + deeper) / self.prefill_tokens_per_s

    def timing(self) -> Timing | None:
        """When requests end; None where the profile does not say."""
        if self.first_token_s is None or self.decode_tokens_per_s is None:
            return None
        return Timing(self.first_token_s, self.decode_tokens_per_s)


def read_device_model(path: Path) -> DeviceModel:
    """Read a profile: a JSON object that ``dflash2 doctor --probe`` wrote or that was written by hand.

    Keys: ``dram_to_hbm_bytes_per_s``, ``nvme_read_bytes_per_s``, ``prefill_tokens_per_s``, ``first_token_s``,
    ``decode_tokens_per_s``, ``admission_s``, ``prefill_doubles_at_tokens``,
    ``block_bytes``. What is missing keeps its default;
    other keys are for others.

    Raises:
        ConfigError: it cannot be read, or a value is not a positive number.
    """
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read the device profile {path}: {error}") from error
    if not isinstance(document, dict):
        raise ConfigError(f"{path} is not a device profile: not a JSON object")
    values: dict[str, Any] = {}
    for name, key in _SPEEDS.items():
        value = document.get(key)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
            raise ConfigError(f"{path}: {key} must be a positive number, not {value!r}")
        values[name] = value
    return DeviceModel(**values)
