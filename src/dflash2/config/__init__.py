"""The one configuration file, ``dflash2_config.json``: its schema, reading it, and what it means on this machine."""

from dflash2.config.effective import EffectiveConfig, effective
from dflash2.config.first_generation import first_generation_leftovers
from dflash2.config.reading import load_config, parse_config
from dflash2.config.schema import (
    Config,
    KVBlockConfig,
    LoraConfig,
    MemoryConfig,
    PipelineConfig,
    PolicyConfig,
    SchedulingConfig,
)

__all__ = [
    "Config",
    "EffectiveConfig",
    "KVBlockConfig",
    "LoraConfig",
    "MemoryConfig",
    "PipelineConfig",
    "PolicyConfig",
    "SchedulingConfig",
    "effective",
    "first_generation_leftovers",
    "load_config",
    "parse_config",
]
