"""``dflash2 serve``: an OpenAI-compatible server over the reference engine."""

from __future__ import annotations

import argparse
import ipaddress
import logging
import os
import socket
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

from dflash2.commands.arguments import KEY_VARIABLE, api_key, positive_int
from dflash2.errors import DFlash2Error

if TYPE_CHECKING:
    from dflash2.config import Config, LoraConfig
    from dflash2.server.context import ServerSettings

logger = logging.getLogger(__name__)


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add ``serve``."""
    parser = subparsers.add_parser("serve", help="serve a model over an OpenAI-compatible HTTP API")
    parser.add_argument("--model", required=True, metavar="PATH", help="model folder, .gguf file or hub id")
    parser.add_argument(
        "--config",
        type=Path,
        metavar="FILE",
        help="dflash2_config.json; without it the defaults apply, with enable true (see `dflash2 config init`)",
    )
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default 127.0.0.1)")
    parser.add_argument("--port", type=_port, default=8000, help="0 picks a free one (default 8000)")
    parser.add_argument("--dtype", choices=("auto", "float32", "bfloat16"), default="auto", help="default auto")
    parser.add_argument("--device", default="cpu", help="torch device, such as cuda:0 (default cpu)")
    parser.add_argument("--max-context", type=positive_int, metavar="TOKENS", help="default: what the model allows")
    parser.add_argument(
        "--served-model-name", nargs="+", metavar="NAME", help="names clients may use (default: the model's file name)"
    )
    parser.add_argument("--chat-template", type=Path, metavar="FILE", help="Jinja template in place of the model's own")
    parser.add_argument(
        "--api-key", metavar="KEY", help=f"ask clients for this key (default: the variable {KEY_VARIABLE})"
    )
    parser.add_argument(
        "--max-body-mb", type=positive_int, default=8, metavar="MB", help="largest request body in MiB (default 8)"
    )
    parser.add_argument(
        "--shutdown-grace-s",
        type=_seconds,
        default=30.0,
        metavar="S",
        help="how long running requests may go on after SIGTERM or Ctrl-C (default 30)",
    )
    parser.add_argument("--access-log", action="store_true", help="log every request")
    parser.add_argument(
        "--record",
        type=Path,
        metavar="FILE",
        help="append traffic to it, for `dflash2 replay`: hashes of prompts, no text",
    )
    parser.add_argument(
        "--lora",
        nargs="+",
        action="extend",
        default=[],
        metavar="NAME=PATH",
        help="adapters that requests may name as their model, beside those of the configuration",
    )
    parser.add_argument(
        "--lora-dir", type=Path, metavar="DIR", help="folder from which clients may load adapters (default: from none)"
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Serve until SIGTERM or SIGINT.

    Everything that can be wrong on the command line is found before the model is loaded.

    Returns:
        0 after an orderly stop, 1 if the engine failed or could not be closed.

    Raises:
        ConfigError: the configuration file is missing or invalid, or an adapter of the command line.
        DFlash2Error: the address is taken, the file for ``--record`` cannot be opened, or the model cannot be loaded.
    """
    from dflash2.config import Config, first_generation_leftovers, load_config
    from dflash2.doctor.startup import startup_lines
    from dflash2.monitoring.recording import TrafficRecorder

    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    for leftover in first_generation_leftovers(os.environ):
        logger.warning(leftover)
    config = Config(enable=True) if args.config is None else load_config(args.config)
    for line in startup_lines(args.config):
        logger.warning("dflash2_doctor %s", line)
    template = None if args.chat_template is None else _read_template(args.chat_template)
    settings = make_settings(args, config)
    config = config.model_copy(update={"lora": with_adapters(config.lora, args.lora, args.lora_dir)})
    recorder = None if args.record is None else TrafficRecorder(args.record, config.kv_block.block_size)
    with _listen(args.host, args.port) as listener:
        if settings.api_key is None and not _is_loopback(listener):
            print(f"dflash2: warning: everybody who reaches {args.host} may use this server", file=sys.stderr)
        from dflash2.engine.factory import create_engine
        from dflash2.engine.model_loader import load_tokenizer
        from dflash2.pipeline.startup import startup_line
        from dflash2.pipeline.tokenizer import Tokenizer
        from dflash2.server.serving import serve

        tokenizer = Tokenizer(load_tokenizer(args.model))
        # In a thread that ends, and its OpenMP workers with it: kept, they would slow the engine's own thread down.
        with ThreadPoolExecutor(1, thread_name_prefix="dflash2-loading") as loading:
            engine = loading.submit(
                create_engine, args.model, config, args.dtype, args.max_context, args.device
            ).result()
        print(engine.runtime.startup_line(), startup_line(config), sep="\n", flush=True)
        return serve(
            engine,
            tokenizer,
            settings,
            listener,
            template,
            adapters=engine.adapters,
            observer=engine.runtime.observer,
            recorder=recorder,
            page_locked=args.device.startswith("cuda"),
            access_log=args.access_log,
        )


def with_adapters(lora: LoraConfig, named: list[str], folder: Path | None) -> LoraConfig:
    """The configuration's adapters and those of the command line.

    Raises:
        ConfigError: one of these is not NAME=PATH, or its name is given twice.
    """
    from dflash2.errors import ConfigError

    adapters = dict(lora.adapters)
    for text in named:
        name, separator, path = text.partition("=")
        if not (separator and name and path):
            raise ConfigError(f"--lora takes NAME=PATH, not {text!r}")
        if name in adapters:
            raise ConfigError(f"--lora: the name {name!r} is given twice")
        adapters[name] = str(Path(path).absolute())
    changes: dict[str, object] = {"adapters": adapters}
    if folder is not None:
        changes["directory"] = str(folder.absolute())
    return lora.model_copy(update=changes)


def make_settings(args: argparse.Namespace, config: Config) -> ServerSettings:
    """The server's settings from the command line, the environment and the configuration file."""
    from dflash2.server.context import ServerSettings
    from dflash2.types import MIB

    return ServerSettings(
        model_names=tuple(args.served_model_name or [Path(args.model).name]),
        api_key=api_key(args.api_key),
        max_body_bytes=args.max_body_mb * MIB,
        shutdown_grace_s=args.shutdown_grace_s,
        pipeline=config.pipeline,
        admission_timeout_s=config.scheduling.admission_timeout_s,
    )


def _listen(host: str, port: int) -> socket.socket:
    """Take the address now, so that a taken one is an error before the model is loaded. Nothing is accepted yet."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
    except OSError as error:
        raise DFlash2Error(f"cannot listen on {host}: {error.strerror or error}") from error
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError as error:
        listener.close()
        raise DFlash2Error(f"cannot listen on {host} port {port}: {error.strerror or error}") from error
    return listener


def _is_loopback(listener: socket.socket) -> bool:
    return ipaddress.ip_address(listener.getsockname()[0]).is_loopback


def _read_template(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DFlash2Error(f"cannot read the chat template {path}: {error}") from error


def _port(text: str) -> int:
    port = int(text)
    if not 0 <= port <= 65535:
        raise argparse.ArgumentTypeError(f"a port is in 0..65535, not {port}")
    return port


def _seconds(text: str) -> float:
    value = float(text)
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"must be a number of seconds, not {text}")
    return value
