"""A server process of SGLang."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import psutil

START_POLLS = 600
"""One a second. Counted, not measured: on a shared machine tests and server are stopped together now and then."""
REQUEST_S = 300.0


class Server:
    """Started with the constructor, ready after ``wait``.

    Args:
        python: interpreter of SGLang's environment.
        model: directory of the model.
        log: where its output goes.
        arguments: more arguments for ``sglang.launch_server``.
        keep_python_path: the server sees ``PYTHONPATH``.
    """

    def __init__(self, python: str, model: str, log: Path, *arguments: str, keep_python_path: bool = False) -> None:
        self.log = log
        self.port = free_port()
        command = [python, "-m", "sglang.launch_server", "--model-path", model, "--host", "127.0.0.1"]
        command += ["--port", str(self.port), "--device", "cpu", "--attention-backend", "torch_native"]
        command += ["--dtype", "float32", "--context-length", "2048", "--skip-server-warmup", "--enable-cache-report"]
        command += ["--enable-metrics", *arguments]
        environment = {**os.environ, "SGLANG_USE_CPU_ENGINE": "1", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        if not keep_python_path:
            environment.pop("PYTHONPATH", None)
        with log.open("wb") as output:
            self.process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=environment)

    def wait(self) -> Server:
        """Until it serves."""
        for _ in range(START_POLLS):
            if self.process.poll() is not None:
                break
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/health_generate", timeout=60):
                    return self
            except (OSError, urllib.error.URLError):
                time.sleep(1.0)
        self.kill()
        raise AssertionError(f"the server did not start; the end of its log:\n{self.text()[-3000:]}")

    def kill(self) -> None:
        """SIGKILL for the server and all its children."""
        if self.process.poll() is None:
            family = psutil.Process(self.process.pid).children(recursive=True)
            for member in [*family, self.process]:
                try:
                    member.kill()
                except psutil.NoSuchProcess:
                    continue
            psutil.wait_procs(family, 30)
        self.process.wait(30)

    def text(self) -> str:
        """The log so far."""
        return self.log.read_text(errors="replace")

    def post(self, path: str, body: dict[str, Any] | None = None) -> Any:
        """POST; the JSON of the answer, or its text."""
        data = json.dumps(body or {}).encode()
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}{path}", data, {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=REQUEST_S) as answer:
            text = answer.read().decode()
        return json.loads(text) if text.startswith(("{", "[")) else text

    def generate(self, token_ids: list[int], num_new: int, *, logprobs: bool = True) -> dict[str, Any]:
        """Greedy continuation, by default with the two best candidates of each position."""
        body: dict[str, Any] = {"input_ids": token_ids}
        body["sampling_params"] = {"temperature": 0, "max_new_tokens": num_new, "ignore_eos": True}
        if logprobs:
            body |= {"return_logprob": True, "top_logprobs_num": 2}
        answer: dict[str, Any] = self.post("/generate", body)
        return answer

    def metrics_of_rank(self, rank: str) -> dict[str, float]:
        """All of them on one rank, without the prefix, once they have been written since the last request."""
        time.sleep(5.0)  # the scheduler writes them every 2 s
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/metrics", timeout=60) as answer:
            lines = answer.read().decode().splitlines()
        found: dict[str, float] = {}
        for match in filter(None, map(re.compile(r"^dflash2_(\w+)\{(.*)\} (\S+)$").match, lines)):
            labels = dict(re.findall(r'(\w+)="(\w+)"', match[2]))
            if labels.pop("rank", None) == rank:
                found[".".join([match[1], *labels.values()])] = float(match[3])
        return found


def free_port() -> int:
    """A port of the loopback that nobody listens on."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
        return port
