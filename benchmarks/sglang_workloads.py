"""Traffic of conversations, and how long each answer took to begin."""

from __future__ import annotations

import http.client
import json
import random
import threading
import time
from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True, slots=True)
class Workload:
    """What is sent in one round.

    Attributes:
        chats, turns: conversations and requests of each.
        document_tokens: the first turn's prompt.
        question_tokens, answer_tokens: of each turn.
        start_s: from the start of one chat to that of the next.
        think_s: between an answer and the next question, give or take a fifth.
        one_shots: requests as long as a first turn that never return.
        one_shot_s: from the answer of one to the next.
    """

    chats: int = 8
    turns: int = 3
    document_tokens: int = 420
    question_tokens: int = 24
    answer_tokens: int = 8
    start_s: float = 1.0
    think_s: float = 8.0
    one_shots: int = 0
    one_shot_s: float = 1.5


WORKLOADS = {
    "a": Workload(),
    "b": Workload(start_s=2.0, think_s=14.0, one_shots=16),  # of 40 requests
    "c": Workload(chats=4, turns=4, document_tokens=90, start_s=0.05, think_s=0.5),
    "d": Workload(),  # with less DRAM than device
}
"""A round lasts half a minute to a minute. A chat returns after all others had their turn."""


@dataclass(frozen=True, slots=True)
class Answer:
    """One request as the client saw it."""

    kind: str
    """``first``, ``returning`` or ``one_shot``."""
    ttft_s: float
    prompt_tokens: int
    output_tokens: int
    device_tokens: int
    host_tokens: int
    """From below the device, whatever the tier."""


class Round:
    """Sends a workload to a server.

    Args:
        port: of the server, on loopback.
        workload: what to send.
        seed: of the prompts and the think times: the same for every setting of a round.
    """

    def __init__(self, port: int, workload: Workload, seed: int) -> None:
        self._port = port
        self._workload = workload
        self._seed = seed
        self._answers: list[Answer] = []
        self._errors: list[Exception] = []

    def run(self) -> tuple[list[Answer], float]:
        """All answers, and the seconds that the round took."""
        workload = self._workload
        threads = [threading.Thread(target=self._guard, args=(self._chat, i)) for i in range(workload.chats)]
        if workload.one_shots:
            threads.append(threading.Thread(target=self._guard, args=(self._stream_of_one_shots, 0)))
        started = time.monotonic()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if self._errors:
            raise self._errors[0]
        return self._answers, time.monotonic() - started

    def _guard(self, target: object, index: int) -> None:
        try:
            target(index)  # type: ignore[operator]
        except Exception as error:  # noqa: BLE001 - reported by the thread that waits
            self._errors.append(error)

    def _chat(self, index: int) -> None:
        rng = random.Random(f"{self._seed} chat {index}")
        workload = self._workload
        time.sleep(workload.start_s * index)
        history = _text(rng, workload.document_tokens)
        for turn in range(workload.turns):
            history += _text(rng, workload.question_tokens)
            history += self._send(history, "returning" if turn else "first")
            if turn < workload.turns - 1:
                time.sleep(workload.think_s * rng.uniform(0.8, 1.2))

    def _stream_of_one_shots(self, _: int) -> None:
        """One after the other: a second client that reads documents."""
        rng = random.Random(f"{self._seed} one-shots")
        workload = self._workload
        for _ in range(workload.one_shots):
            self._send(_text(rng, workload.document_tokens + workload.question_tokens), "one_shot")
            time.sleep(workload.one_shot_s * rng.uniform(0.8, 1.2))

    def _send(self, prompt: list[int], kind: str) -> list[int]:
        sampling = {"temperature": 0, "max_new_tokens": self._workload.answer_tokens, "ignore_eos": True}
        body = {"input_ids": prompt, "sampling_params": sampling, "stream": True}
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=300)
        started = time.monotonic()
        connection.request("POST", "/generate", json.dumps(body), {"Content-Type": "application/json"})
        ttft_s, last = 0.0, {}
        for line in connection.getresponse():
            if line.startswith(b"data: {"):
                ttft_s = ttft_s or time.monotonic() - started
                last = json.loads(line[6:])
        connection.close()
        meta = last["meta_info"]
        cached = meta.get("cached_tokens_details") or {}
        host = sum(count for name, count in cached.items() if name != "device" and isinstance(count, int))
        device = meta["cached_tokens"] - host
        self._answers.append(Answer(kind, ttft_s, len(prompt), meta["completion_tokens"], device, host))
        output: list[int] = last["output_ids"]
        return output


def of_answers(answers: list[Answer], seconds: float) -> dict[str, Any]:
    """The figures of one round; ``tokens_by_source`` does not know yet which tier below the device it was."""
    ttft = np.array([answer.ttft_s for answer in answers])
    device = sum(answer.device_tokens for answer in answers)
    host = sum(answer.host_tokens for answer in answers)
    returning = [answer for answer in answers if answer.kind == "returning"]
    reused = sum(answer.device_tokens + answer.host_tokens for answer in returning)
    return {
        "ttft_mean_s": float(ttft.mean()),
        "ttft_p50_s": float(np.percentile(ttft, 50)),
        "ttft_p99_s": float(np.percentile(ttft, 99)),
        "ttft_first_mean_s": _mean([answer.ttft_s for answer in answers if answer.kind == "first"]),
        "ttft_returning_mean_s": _mean([answer.ttft_s for answer in returning]),
        "output_tokens_per_s": sum(answer.output_tokens for answer in answers) / seconds,
        "tokens_by_source": {
            "device": device,
            "dram": host,
            "nvme": 0,
            "recomputed": sum(answer.prompt_tokens for answer in answers) - device - host,
        },
        "returning_reused_share": reused / max(1, sum(answer.prompt_tokens for answer in returning)),
    }


def moved(sources: dict[str, int] | None, before: dict[str, float], after: dict[str, float]) -> dict[str, Any]:
    """What the servers say of a round: bytes written, and which tier the tokens from below the device came from.

    HiCache does not tell its host pool and its file storage apart: all of its are counted as DRAM.

    Args:
        sources: of ``of_answers``.
        before, after: ``BenchServer.written`` around the round.
    """
    change = {name: after[name] - before[name] for name in after}
    found: dict[str, Any] = {"dram_bytes_written": change["dram"], "disk_bytes_written": change["disk"]}
    if sources is not None:
        nvme = min(sources["dram"], int(change.get("from_nvme", 0)))
        found["tokens_by_source"] = {**sources, "dram": sources["dram"] - nvme, "nvme": nvme}
    return found


def _mean(values: list[float]) -> float:
    return float(np.mean(values)) if values else 0.0


def _text(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(1000, 40000) for _ in range(count)]
