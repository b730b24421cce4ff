"""Entry point of the group ``sglang.srt.plugins``: the flag, and the hooks in the processes that need them."""

from __future__ import annotations

import argparse
import logging
import multiprocessing
import os
import sys
from typing import TYPE_CHECKING, Any

from dflash2.errors import DFlash2Error
from dflash2.integrations.sglang import hookpoints, settings
from dflash2.integrations.sglang.errors import refuse

if TYPE_CHECKING:
    from dflash2.config import Config

logger = logging.getLogger(__name__)

FLAG = "--dflash2-config"
_HELP = (
    "dflash2_config.json: keep KV-cache blocks in DRAM and on NVMe when the device is full. Not related to the "
    "speculative-decoding drafter DFLASH."
)
_LINKER_MODULE = "dflash2.integrations.sglang.linker"


def register() -> None:
    """Register the hooks of this process. Called by SGLang in each of its processes."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(hookpoints.ADD_CLI_ARGS.path, add_flag, HookType.AFTER)
    HookRegistry.register(hookpoints.FROM_CLI_ARGS.path, read_flag, HookType.AFTER)
    HookRegistry.register(hookpoints.RESOLVE_ONCE.path, apply_config, HookType.BEFORE)
    # Targets are imported when the hooks are applied: only the scheduler's processes have the scheduler in any case.
    is_child = multiprocessing.parent_process() is not None
    if is_child and settings.configured_path() and "sglang.srt.managers.scheduler" in sys.modules:
        from dflash2.integrations.sglang import scheduler_hooks

        problems = hookpoints.moved((*hookpoints.IN_SCHEDULER, *hookpoints.READ_ONLY))
        if problems:
            refuse("SGLang is not as expected: " + "; ".join(problems))
        scheduler_hooks.register(HookRegistry, HookType)


def add_flag(result: None, parser: argparse.ArgumentParser) -> None:
    """Give the command line ``--dflash2-config``; ``--config`` files get the key with it."""
    parser.add_argument(FLAG, type=str, default=None, metavar="FILE", help=_HELP)


def read_flag(result: Any, cls: type, args: argparse.Namespace) -> None:
    """Hand the path on to ``apply_config``, in this process and its children."""
    path = getattr(args, "dflash2_config", None)
    if path is not None:
        os.environ[settings.VARIABLE] = settings.absolute(path)


def apply_config(server_args: Any) -> None:
    """Before SGLang resolves its arguments: add what DFlash2 needs, or end the process."""
    path = settings.configured_path()
    if path is None or getattr(server_args, "_resolution_finished", False):
        return
    try:
        config = settings.read(path)
        if not config.enable:
            del os.environ[settings.VARIABLE]  # nothing is hooked in the children either
            logger.warning("DFlash2: fallback, enable is not true in %s", path)
            return
        _check_version()
        found = settings.conflicts(server_args)
        if found:
            refuse(f"{', '.join(found)} and {FLAG} cannot be on together")
        server_args.page_size = settings.page_size(config, server_args.page_size)
        _check_machine(config, server_args)
    except DFlash2Error as error:
        refuse(str(error))
    server_args.enable_unified_cache_external_linker = True
    server_args.unified_cache_external_linker_backend = "dynamic"
    server_args.unified_cache_external_linker_config = {
        "linker": "DFlash2Linker",
        "linker_module_path": _LINKER_MODULE,
        "linker_extra_config": {"path": path},
    }


def _check_machine(config: Config, server_args: Any) -> None:
    """What this machine cannot give is said now, not when the weights are loaded."""
    from dflash2.build import check_start

    world_size = (getattr(server_args, "tp_size", None) or 1) * (getattr(server_args, "dp_size", None) or 1)
    here = max(1, world_size // (getattr(server_args, "nnodes", None) or 1))
    first = here * (getattr(server_args, "node_rank", None) or 0)
    check_start(config, world_size, range(first, first + here))


def _check_version() -> None:
    from importlib.metadata import version

    found = version("sglang")
    if found not in hookpoints.TESTED_VERSIONS:
        tested = ", ".join(hookpoints.TESTED_VERSIONS)
        refuse(f"SGLang {found} has not been tested with this release of DFlash2, which supports {tested}")
