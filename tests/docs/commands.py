"""Finds the commands in the documents' code blocks."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = sorted([*ROOT.glob("README*.md"), *(ROOT / "docs").glob("*.md")])
PROGRAMS = ("dflash2", "make", "pip", "python", "curl", "grep", "promtool")
_BLOCK = re.compile(r"^```(\w*)[^\n]*\n(.*?)^```", re.MULTILINE | re.DOTALL)
_HERE_DOCUMENT = re.compile(r"<<'?(\w+)'?\n.*?^\1$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Command:
    """One command line.

    Attributes:
        document: where it stands.
        argv: without the shell's part of it.
    """

    document: str
    argv: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.document}: {' '.join(self.argv)}"


def commands() -> Iterator[Command]:
    """Every command of every document."""
    for path in DOCUMENTS:
        for language, block in _BLOCK.findall(path.read_text(encoding="utf-8")):
            if language in ("", "console", "bash", "sh"):
                yield from (Command(path.name, argv) for argv in _lines(block, prompt=language == "console"))


def _lines(block: str, *, prompt: bool) -> Iterator[tuple[str, ...]]:
    text = _HERE_DOCUMENT.sub("", block).replace("\\\n", " ")
    for line in text.splitlines():
        command = line.removeprefix("$ ").strip()
        if prompt and not line.startswith("$ "):
            continue  # what the command printed
        if command.split(" ")[0] in PROGRAMS or prompt:
            yield tuple(shlex.split(command, comments=True))
