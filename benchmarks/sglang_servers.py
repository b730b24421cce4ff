"""SGLang servers to compare: one per setting, with the same device pool and the same budgets below it, on a CPU.

They stay up and take turns: all but the one that is measured are stopped (SIGSTOP), so that none takes another's cores.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import psutil

HERE = Path(__file__).resolve().parent
COUNTER = "DFLASH2_BENCH_HOST_BYTES"
FLOAT32_BYTES = 4
MIB = 1 << 20
START_S = 900.0
SETTINGS = ("plain", "hicache-host", "hicache-file", "dflash2-dram", "dflash2-nvme")
WITH_ORDER = "-lpm"
"""After the name of a setting: with SGLang's longest prefix match instead of first come, first served."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """In tokens; the same for all settings."""

    device: int = 1024
    dram: int = 2048
    disk: int = 16384
    page: int = 32


@dataclass(slots=True)
class BenchServer:
    """A running server.

    Attributes:
        setting: one of ``SETTINGS``, with ``WITH_ORDER`` or without.
        place: folder of its files.
        port: on loopback.
        process: the server; the scheduler is one of its children.
    """

    setting: str
    place: Path
    port: int
    process: subprocess.Popen[bytes]
    _family: list[psutil.Process] = field(default_factory=list)

    def wait(self) -> None:
        """Until it serves."""
        deadline = time.monotonic() + START_S
        while time.monotonic() < deadline and self.process.poll() is None:
            with contextlib.suppress(OSError):
                urllib.request.urlopen(f"http://127.0.0.1:{self.port}/health_generate", timeout=30).close()
                server = psutil.Process(self.process.pid)
                self._family = [*server.children(recursive=True), server]
                return
            time.sleep(0.5)
        end = (self.place / "log").read_text(errors="replace")[-3000:]
        raise RuntimeError(f"{self.setting} did not start; the end of its log:\n{end}")

    @contextlib.contextmanager
    def turn(self) -> Iterator[None]:
        """It runs inside; it is stopped outside."""
        self._signal("resume")
        try:
            yield
        finally:
            self._signal("suspend")

    def stop(self) -> None:
        """Stopped until its turn comes."""
        self._signal("suspend")

    def kill(self) -> None:
        """End it and its children, whether it ever served or not."""
        with contextlib.suppress(psutil.NoSuchProcess):
            self._family = psutil.Process(self.process.pid).children(recursive=True)
        self._signal("kill")
        self.process.kill()
        self.process.wait(30)

    def device_tokens(self) -> int:
        """Tokens of the device pool, as the server says."""
        found = re.search(r"max_total_num_tokens=(\d+)", (self.place / "log").read_text(errors="replace"))
        if found is None:
            raise RuntimeError(f"{self.setting}: no pool size in the log")
        return int(found[1])

    def written(self) -> dict[str, float]:
        """Bytes written to DRAM and to disk since the start, and tokens reused by tier, where the server says."""
        if self.setting.startswith("hicache"):
            counter = np.memmap(self.place / "host_bytes", np.int64, "r", shape=(1,))
            return {"dram": float(counter[0]), "disk": float(_size_of_files(self.place / "files"))}
        if self.setting == "plain":
            return {"dram": 0.0, "disk": 0.0}
        time.sleep(2.5)  # the scheduler writes its metrics every 2 s
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/metrics", timeout=30) as answer:
            text = answer.read().decode()
        written = {"dram": 0.0, "disk": 0.0, "from_dram": 0.0, "from_nvme": 0.0}
        for name, labels, value in re.findall(r"^dflash2_(\w+)\{(.*)\} (\S+)$", text, re.MULTILINE):
            label = dict(re.findall(r'(\w+)="([^"]*)"', labels))
            if name == "copied_bytes_total":
                written["dram"] += float(value) * (label["tier"] == "dram")
                written["disk"] += float(value) * (label["tier"] == "nvme")
            if name == "prefix_hit_tokens_total" and label["origin"] != "hbm":
                written["from_" + label["origin"]] += float(value)
        return written

    def _signal(self, name: str) -> None:
        for member in self._family:
            with contextlib.suppress(psutil.NoSuchProcess):
                getattr(member, name)()


def start(setting: str, sizes: Sizes, place: Path, python: str, model: str, threads: int) -> BenchServer:
    """Start a server; ``wait`` for it."""
    place.mkdir(parents=True)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [python, "-m", "sglang.launch_server", "--model-path", model, "--host", "127.0.0.1", "--port", str(port)]
    command += ["--device", "cpu", "--attention-backend", "torch_native", "--dtype", "float32", "--sleep-on-idle"]
    command += ["--context-length", "4096", "--skip-server-warmup", "--enable-cache-report", "--enable-metrics"]
    environment = {**os.environ, "SGLANG_USE_CPU_ENGINE": "1", "OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1"}
    environment["PYTHONPATH"] = os.pathsep.join([str(HERE / "sglang_cpu"), os.environ.get("PYTHONPATH", "")])
    arguments, variables = _of_setting(setting.removesuffix(WITH_ORDER), sizes, place, token_bytes(Path(model)))
    if setting.endswith(WITH_ORDER):
        arguments += ["--schedule-policy", "lpm"]
    with (place / "log").open("wb") as log:
        process = subprocess.Popen(
            command + arguments, stdout=log, stderr=subprocess.STDOUT, env=environment | variables
        )
    return BenchServer(setting, place, port, process)


def _size_of_files(folder: Path) -> int:
    """Bytes of a file storage that may be writing; what it has not finished does not count yet."""
    total = 0
    for file in folder.iterdir():
        with contextlib.suppress(FileNotFoundError):
            total += 0 if file.name.startswith(".") else file.stat().st_size
    return total


def token_bytes(model: Path) -> int:
    """KV of one token of a model: layers, K and V, heads, dimension."""
    config = json.loads((model / "config.json").read_text())
    dimension = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    return int(config["num_hidden_layers"] * 2 * config["num_key_value_heads"] * dimension * FLOAT32_BYTES)


def _of_setting(setting: str, sizes: Sizes, place: Path, one_token: int) -> tuple[list[str], dict[str, str]]:
    pool = ["--max-total-tokens", str(sizes.device), "--page-size", str(sizes.page)]
    if setting == "plain":
        return pool, {}
    if setting.startswith("hicache"):
        (place / "files").mkdir()
        np.zeros(1, np.int64).tofile(place / "host_bytes")
        arguments = [*pool, "--enable-hierarchical-cache", "--hicache-ratio", str(sizes.dram / sizes.device)]
        arguments += ["--hicache-io-backend", "direct", "--hicache-mem-layout", "layer_first"]
        if setting == "hicache-file":
            arguments += ["--hicache-storage-backend", "file"]
        variables = {COUNTER: str(place / "host_bytes")}
        return arguments, variables | {"SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR": str(place / "files")}
    tiers = {"hbm": sizes.device, "dram": sizes.dram, "nvme": sizes.disk if setting == "dflash2-nvme" else 0}
    memory: dict[str, Any] = {f"{tier}_capacity_mb": tokens * one_token // MIB for tier, tokens in tiers.items()}
    memory |= {"staging_buffer_size_mb": 8}
    config = {"enable": True, "memory": {**memory, "nvme_path": str(place / "nvme")}}
    batch = min(8, sizes.dram // sizes.page // 4)
    config |= {"kv_block": {"block_size": sizes.page}, "policy": {"swap_batch_size": batch}}
    (place / "dflash2_config.json").write_text(json.dumps(config))
    return ["--dflash2-config", str(place / "dflash2_config.json")], {}
