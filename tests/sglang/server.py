"""A server process of SGLang, and the traffic that the tests send to it."""

from __future__ import annotations

import json
import os
import random
import re
import socket
import subprocess
import time
import urllib.error
import urllib.request
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

START_S = 600.0
REQUEST_S = 300.0


class Server:
    """Started with the constructor, ready after ``wait``.

    Args:
        python: interpreter of SGLang's environment.
        model: directory of the model.
        log: where its output goes.
        arguments: more arguments for ``sglang.launch_server``.
    """

    def __init__(self, python: str, model: str, log: Path, *arguments: str) -> None:
        self.log = log
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        command = [python, "-m", "sglang.launch_server", "--model-path", model, "--host", "127.0.0.1"]
        command += ["--port", str(self.port), "--device", "cpu", "--attention-backend", "torch_native"]
        command += ["--dtype", "float32", "--context-length", "2048", "--skip-server-warmup", "--enable-cache-report"]
        command += ["--enable-metrics", *arguments]
        environment = {**os.environ, "SGLANG_USE_CPU_ENGINE": "1", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        environment.pop("PYTHONPATH", None)
        with log.open("wb") as output:
            self.process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=environment)

    def wait(self) -> Server:
        """Until it serves."""
        deadline = time.monotonic() + START_S
        while time.monotonic() < deadline:
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
        pattern = re.compile(rf'^dflash2_(\w+){{rank="{rank}"(?:,tier="(\w+)")?}} (\S+)$')
        found = [match for match in map(pattern.match, lines) if match]
        return {".".join(filter(None, match.group(1, 2))): float(match.group(3)) for match in found}


@dataclass(slots=True)
class Reference:
    """What plain SGLang answers to the traffic.

    Attributes:
        prompts: in the order in which they are sent.
        outputs: for each prompt its tokens.
        gaps: for each output token, the difference of the two best log-probabilities.
    """

    prompts: list[list[int]] = field(default_factory=list)
    outputs: list[list[int]] = field(default_factory=list)
    gaps: list[list[float]] = field(default_factory=list)

    def compare(self, server: Server, num_new: int) -> Traffic:
        """Send the same prompts, one after the other."""
        seen = Traffic()
        for prompt, output, gaps in zip(self.prompts, self.outputs, self.gaps, strict=True):
            answer = server.generate(prompt, num_new)
            seen.note(answer, output, gaps)
        return seen


@dataclass(slots=True)
class Traffic:
    """What a server answered, against the reference."""

    cached_tokens: int = 0
    host_tokens: int = 0
    ties: int = 0
    num_tokens: int = 0
    wrong: list[str] = field(default_factory=list)

    def note(self, answer: dict[str, Any], output: list[int], gaps: list[float]) -> None:
        """Compare one answer."""
        details = answer["meta_info"].get("cached_tokens_details") or {}
        self.cached_tokens += answer["meta_info"]["cached_tokens"]
        self.host_tokens += details.get("host", 0)
        self.num_tokens += len(output)
        got = answer["output_ids"]
        if got == output:
            return
        at = next(i for i, (a, b) in enumerate(zip(got, output, strict=True)) if a != b)
        if gaps[at] < 1e-3:
            self.ties += 1
        else:
            self.wrong.append(f"token {at}: {got[at]} instead of {output[at]}, gap {gaps[at]:.4f}, {details}")


def reference_of(server: Server, num_chats: int, num_turns: int, prompt_tokens: int, num_new: int) -> Reference:
    """Conversations of several turns, all first turns before all second ones; and what the server answers."""
    rng = random.Random(7)
    reference = Reference()
    histories = [_text(rng, prompt_tokens) for _ in range(num_chats)]
    for turn in range(num_turns):
        for history in histories:
            if turn:
                history += _text(rng, 24)
            answer = server.generate(list(history), num_new)
            reference.prompts.append(list(history))
            reference.outputs.append(answer["output_ids"])
            best = answer["meta_info"]["output_top_logprobs"]
            reference.gaps.append([position[0][0] - position[1][0] for position in best])
            history += answer["output_ids"]
    return reference


def _text(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(1000, 40000) for _ in range(count)]
