"""The documents: their tables follow from the code, their links lead somewhere, their commands work."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from tests.docs.commands import ROOT, Command, commands

from dflash2.cli import build_parser, main

sys.path.insert(0, str(ROOT / "tools" / "docs"))
import tables

PLAIN_LLAMA = """{"model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 4096,
"num_hidden_layers": 32, "num_attention_heads": 32,
"num_key_value_heads": 8, "intermediate_size": 14336, "vocab_size": 128256,
"max_position_embeddings": 131072, "torch_dtype": "bfloat16", "tie_word_embeddings": false}"""
EVERY = list(commands())
OUR_OWN = [command for command in EVERY if command.argv[0] == "dflash2"]


@pytest.mark.parametrize("name", tables.TABLES)
def test_tables_are_up_to_date(name: str) -> None:
    file, table = tables.TABLES[name]
    text = (tables.DOCS / file).read_text(encoding="utf-8")
    assert tables.with_table(text, name, table()) == text, "run: python tools/docs/tables.py"


def test_every_page_is_in_the_navigation() -> None:
    listed = set(re.findall(r"[\w/-]+\.md", (ROOT / "mkdocs.yml").read_text(encoding="utf-8")))
    pages = {str(path.relative_to(ROOT / "docs")) for path in (ROOT / "docs").rglob("*.md")}
    assert {page for page in pages if not page.startswith("decisions/0")} == listed


def test_the_documents_build_without_a_warning(tmp_path: Path) -> None:
    pytest.importorskip("mkdocs")
    result = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "-d", str(tmp_path)],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    for page in tmp_path.rglob("*.html"):
        loaded = re.findall(
            r'<(?:script|link|img)\b[^>]*?(?:src|href)="(https?://[^"]+)"', page.read_text(encoding="utf-8")
        )
        assert loaded == [], f"{page.name} loads from elsewhere"


def test_links_of_the_readme_lead_somewhere() -> None:
    for readme in ROOT.glob("README*.md"):
        for target in re.findall(r"\]\(([^)#]+)", readme.read_text(encoding="utf-8")):
            assert target.startswith("http") or (ROOT / target).exists(), f"{readme.name}: {target}"


def test_the_chinese_readme_says_the_same() -> None:
    """The same code and commands, and the same figures in its tables."""

    def of(name: str) -> tuple[list[str], list[list[str]]]:
        text = (ROOT / name).read_text(encoding="utf-8")
        blocks = [
            block for block in re.findall(r"^```.*?^```$", text, re.MULTILINE | re.DOTALL) if "mermaid" not in block
        ]
        rows = [line.split("|")[2:-1] for line in text.splitlines() if line.startswith("|")]
        return blocks, [cells for cells in rows if all(re.fullmatch(r"[\d.,/ –]+", cell) for cell in cells)]

    assert of("README.md") == of("README.zh-CN.md"), "README.zh-CN.md is behind README.md"


def test_there_are_commands_to_test() -> None:
    assert len(EVERY) > 30 and len(OUR_OWN) > 20


@pytest.mark.parametrize("command", OUR_OWN, ids=str)
def test_our_own_commands_have_these_options(command: Command, capsys: pytest.CaptureFixture[str]) -> None:
    if command.argv[1:] == ("--version",):
        return  # argparse ends the process
    try:
        build_parser().parse_args(command.argv[1:])
    except SystemExit:
        pytest.fail(f"{command}: {capsys.readouterr().err}")


@pytest.mark.parametrize("command", [one for one in EVERY if one not in OUR_OWN], ids=str)
def test_other_commands_name_what_is_there(command: Command) -> None:
    program, *rest = command.argv
    if program == "make":
        targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
        assert rest and set(rest) <= set(targets)
    elif program == "pip":
        extras = re.findall(r"^(\w+) = \[", (ROOT / "pyproject.toml").read_text(encoding="utf-8"), re.MULTILINE)
        wanted = re.findall(r"dflash2\[([\w,]+)\]", " ".join(rest))
        assert {extra for group in wanted for extra in group.split(",")} <= set(extras)
    elif program == "python":
        assert rest[:2] == ["-m", "sglang.launch_server"] or (ROOT / rest[0]).is_file()
        assert rest[0] != "-m" or "--dflash2-config" in rest
    elif program == "curl":
        path = re.search(r"(?:127\.0\.0\.1|localhost):\d+(?:/v1)?(/[\w/.]+)", " ".join(rest))
        assert path is not None and path[1] in routes()
    elif program == "promtool":
        assert (ROOT / rest[-1]).is_file()
    else:
        assert program == "grep" and "dflash2_" in " ".join(rest)


def routes() -> set[str]:
    """Paths of all routes, as the source names them, without the prefix of OpenAI's."""
    sources = [path for part in ("server", "monitoring") for path in (ROOT / "src/dflash2" / part).glob("*.py")]
    found = (re.findall(r'@router\.(?:get|post)\("([^"]+)"', path.read_text(encoding="utf-8")) for path in sources)
    return {path.removeprefix("/v1") for paths in found for path in paths}


def test_the_first_commands_of_a_new_user_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Those of the quick start that need neither a model nor a server, in order, as they stand there."""
    monkeypatch.chdir(tmp_path)
    config = tmp_path / "config.json"
    config.write_text(PLAIN_LLAMA, encoding="utf-8")
    ran = []
    for command in OUR_OWN:
        argv = [str(config) if part == "Qwen/Qwen2.5-72B-Instruct" else part for part in command.argv[1:]]
        if command.document == "quick-start.md" and argv[0] in ("doctor", "config", "plan"):
            code = main(argv)
            assert code == 0 or (argv[0] == "doctor" and code in (1, 2)), f"{command}: {capsys.readouterr()}"
            ran.append(argv[0])
    assert ran == ["doctor", "config", "config", "plan"]
    assert (tmp_path / "dflash2_config.json").is_file() and (tmp_path / "plan.json").is_file()
    assert main(["config", "check", "plan.json"]) == 0
