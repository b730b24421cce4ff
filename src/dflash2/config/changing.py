"""Settings that may be changed while a server runs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from annotated_types import Ge, Le
from pydantic import BaseModel, ValidationError

from dflash2.config.problems import Problem, describe_error, path_text
from dflash2.config.schema import Config
from dflash2.errors import ConfigError

SECTION_OF = {
    "cold_threshold": "policy",
    "swap_batch_size": "policy",
    "adaptive": "policy",
    "high_watermark": "policy",
    "low_watermark": "policy",
    "refresh_interval_s": "policy",
    "prefetch_window": "kv_block",
}
"""Names of the settings that may be changed, and where in the file each belongs."""


def running_values(config: Config) -> dict[str, Any]:
    """The settings of ``SECTION_OF`` and their values."""
    return {name: getattr(getattr(config, section), name) for name, section in SECTION_OF.items()}


def limits() -> dict[str, tuple[float, float]]:
    """Smallest and largest value of each setting that has a closed range."""
    found: dict[str, tuple[float, float]] = {}
    for name, section in SECTION_OF.items():
        model = Config.model_fields[section].annotation
        assert isinstance(model, type) and issubclass(model, BaseModel)
        bounds = model.model_fields[name].metadata
        low = next((bound.ge for bound in bounds if isinstance(bound, Ge)), None)
        high = next((bound.le for bound in bounds if isinstance(bound, Le)), None)
        if isinstance(low, (int, float)) and isinstance(high, (int, float)):
            found[name] = (low, high)
    return found


def with_changes(config: Config, changes: Mapping[str, Any]) -> Config:
    """The configuration with some settings changed, validated as the file is.

    Args:
        config: what is in effect.
        changes: new values by the names of ``SECTION_OF``.

    Raises:
        ConfigError: lists every problem; nothing has changed.
    """
    unknown = [name for name in changes if name not in SECTION_OF]
    if unknown:
        raise ConfigError(f"cannot be changed while running; what can: {', '.join(SECTION_OF)}", unknown[0])
    document = config.model_dump()
    for name, value in changes.items():
        document[SECTION_OF[name]][name] = value
    try:
        return Config.model_validate(document)
    except ValidationError as error:
        problems = [describe_error(detail) for detail in error.errors(include_url=False)]
        raise ConfigError(_listed(problems)) from error


def _listed(problems: list[Problem]) -> str:
    return "; ".join(f"{path_text(problem.path)}: {problem.message}" for problem in problems)
