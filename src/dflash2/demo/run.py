"""The demo from the model's file to the table."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from dflash2.config import Config
from dflash2.demo.compare import acceptable, first_divergences
from dflash2.demo.play import Player, Transcript
from dflash2.demo.report import print_table, print_verdict, setting_result
from dflash2.demo.settings import DemoSize, make_settings
from dflash2.demo.workload import Chat, make_chats
from dflash2.engine.factory import assemble_engine
from dflash2.engine.model_loader import LoadedModel, load_model, load_tokenizer


def run_demo(model: str, size: DemoSize, json_path: Path | None, nvme_dir: Path | None) -> bool:
    """Play the same chats in three settings, print the comparison, write it as JSON.

    Args:
        model: model folder, GGUF file or hub id.
        size: how much to do.
        json_path: where to write the result; None: nowhere.
        nvme_dir: folder for the NVMe file; None: a temporary one. It is empty again afterwards.

    Returns:
        Whether the answers are the same in all settings (ties in float32 aside, see ``demo.compare``).
    """
    console = Console()
    with console.status(f"loading {Path(model).name}"):
        loaded = load_model(model)
        tokenizer = load_tokenizer(model)
    chats = make_chats(tokenizer, size.num_chats, size.num_turns, size.output_tokens, size.context_tokens)
    layout = loaded.kv_layout(size.block_size)
    turns = sum(chat.num_turns for chat in chats)
    answers = f"{turns} answers of {size.output_tokens} tokens"
    console.print(f"{len(chats)} chats, {answers}, {size.working_set_tokens:,} tokens of context")
    transcripts: dict[str, Transcript] = {}
    results: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory(dir=nvme_dir) as folder, _progress(console) as progress:
        for name, config in make_settings(size, layout, Path(folder)).items():
            task = progress.add_task(name, total=turns * size.output_tokens)
            transcripts[name], stats = _play(loaded, config, chats, size, partial(progress.advance, task))
            results[name] = setting_result(transcripts[name], stats, layout.bytes_per_token, size.working_set_tokens)
    divergences = {
        name: first_divergences(transcripts["all_hbm"], transcripts[name]) for name in ("recompute", "dflash2")
    }
    identical = all(acceptable(found, turns * size.output_tokens) for found in divergences.values())
    print_table(console, results)
    print_verdict(console, identical, divergences)
    if json_path is not None:
        json_path.parent.mkdir(parents=True, exist_ok=True)
        json_path.write_text(json.dumps({"identical": identical, "settings": results}, indent=2) + "\n")
    return identical


def _play(
    loaded: LoadedModel, config: Config, chats: list[Chat], size: DemoSize, on_token: Callable[[], None]
) -> tuple[Transcript, dict[str, Any]]:
    engine = assemble_engine(loaded, config)
    try:
        transcript = Player(engine, chats, size.output_tokens, on_token).play()
        engine.check_integrity()
        return transcript, engine.stats()
    finally:
        engine.close()


def _progress(console: Console) -> Progress:
    columns = (TextColumn("{task.description:10}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    return Progress(*columns, console=console)
