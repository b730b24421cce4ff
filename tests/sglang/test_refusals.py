"""What cannot work together ends the server with a message and a non-zero exit code."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from tests.sglang.conftest import MODEL, PYTHON
from tests.sglang.server import Server

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(900)]

ENABLED = '{"enable": true}'


@pytest.mark.parametrize(
    ("text", "arguments", "said"),
    [
        (None, (), "cannot read"),
        ('{"enable": true, "memory": {"nvme_path": "relative"}}', (), "memory.nvme_path"),
        (ENABLED, ("--enable-hierarchical-cache",), "HiCache"),
        (ENABLED, ("--speculative-algorithm", "NGRAM"), "--speculative-algorithm"),
        (ENABLED, ("--disaggregation-mode", "prefill"), "--disaggregation-mode"),
        ('{"enable": true, "kv_block": {"block_size": 64}}', ("--page-size", "32"), "kv_block.block_size"),
    ],
    ids=["missing", "invalid", "hicache", "speculative", "disaggregation", "page-size"],
)
def test_what_cannot_be_ends_with_a_message(
    tmp_path: Path, text: str | None, arguments: tuple[str, ...], said: str
) -> None:
    path = tmp_path / "config.json"
    if text is not None:
        path.write_text(text)
    refused = refusal(Server(PYTHON, MODEL, tmp_path / "log", "--dflash2-config", str(path), *arguments))
    assert said in refused


def test_another_release_of_sglang_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = tmp_path / "packages" / "sglang-0.6.0.dist-info"
    other.mkdir(parents=True)
    (other / "METADATA").write_text("Metadata-Version: 2.1\nName: sglang\nVersion: 0.6.0\n")
    path = tmp_path / "config.json"
    path.write_text(ENABLED)
    monkeypatch.setenv("PYTHONPATH", str(other.parent))
    server = Server(PYTHON, MODEL, tmp_path / "log", "--dflash2-config", str(path), keep_python_path=True)
    assert "SGLang 0.6.0" in refusal(server)


@pytest.mark.parametrize(
    ("pool", "components"),
    [
        ("sglang.srt.mem_cache.memory_pool.MLATokenToKVPool", "FULL"),
        ("sglang.srt.mem_cache.swa_memory_pool.SWAKVPool", "FULL SWA"),
        ("sglang.srt.mem_cache.memory_pool.HybridLinearKVPool", "FULL MAMBA"),
    ],
    ids=["mla", "sliding-window", "hybrid"],
)
def test_other_kv_layouts_are_named(pool: str, components: str) -> None:
    """With SGLang's own pools, made without memory: models that use them do not run on a CPU."""
    code = (
        "import pkgutil\n"
        "from types import SimpleNamespace as Has\n"
        "from dflash2.integrations.sglang.build import _mirror_pool\n"
        f"pool = object.__new__(pkgutil.resolve_name({pool!r}))\n"
        "params = Has(token_to_kv_pool_allocator=Has(get_kvcache=lambda: pool), page_size=16)\n"
        f"_mirror_pool(params, [Has(name=each) for each in {components.split()!r}], None, None)"
    )
    done = subprocess.run([PYTHON, "-c", code], capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 2
    assert "DFlash2: cannot start: the KV layout of this model is not supported" in done.stderr
    assert pool.rpartition(".")[2] in done.stderr


def test_hooks_are_where_they_were() -> None:
    """Names what moved when SGLang's interface changes."""
    code = (
        "import sglang.srt.managers.scheduler\n"
        "from dflash2.integrations.sglang import hookpoints as h\n"
        "print('\\n'.join(h.moved((*h.IN_FRONT_END, *h.IN_SCHEDULER, *h.READ_ONLY))))"
    )
    done = subprocess.run([PYTHON, "-c", code], capture_output=True, text=True, timeout=600, check=True)
    assert done.stdout.strip() == ""


def refusal(server: Server) -> str:
    """Log of a server that must end by itself, and say why."""
    try:
        assert server.process.wait(300) != 0
        assert "DFlash2: cannot start" in server.text()
        return server.text()
    finally:
        server.kill()
