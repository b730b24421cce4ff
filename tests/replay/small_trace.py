"""A small trace of the project's own: chats that go on, agents that loop, prompts that come once. Kept as a file.

``python -m tests.replay.small_trace`` writes it anew; it must come out the same.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

SMALL_TRACE = Path(__file__).parent / "small_trace.jsonl"
NUM_REQUESTS = 600


def make_small_trace() -> list[dict[str, Any]]:
    """Requests in the agent format, with gaps that depend on the stop reason."""
    rng = random.Random(20261130)
    system = [0, 1, 2]
    fresh = 3
    sessions: dict[int, tuple[list[int], str]] = {}
    due: list[tuple[float, int]] = []
    lines: list[dict[str, Any]] = []
    now = 0.0
    while len(lines) < NUM_REQUESTS:
        now += rng.expovariate(1.0)
        ready = [entry for entry in due if entry[0] <= now]
        if ready:
            entry = min(ready)
            due.remove(entry)
            now = max(now, entry[0])
            session = entry[1]
            blocks, stop = sessions[session]
        else:
            session, stop = len(sessions), "end_turn"
            blocks = list(system) if rng.random() < 0.7 else []
        grow = rng.randint(1, 6)
        blocks = [*blocks, *range(fresh, fresh + grow)]
        fresh += grow
        kind = "tool_result" if stop == "tool_use" else "text"
        stop = rng.choices(["tool_use", "end_turn"], [0.6, 0.4])[0]
        sessions[session] = (blocks, stop)
        if rng.random() < (0.95 if stop == "tool_use" else 0.5):
            due.append((now + (rng.uniform(3, 15) if stop == "tool_use" else rng.uniform(60, 400)), session))
        lines.append(
            {
                "timestamp": round(now * 1000),
                "input_length": 512 * len(blocks) - rng.randint(0, 511),
                "output_length": rng.randint(1, 600),
                "session_id": str(session),
                "hash_ids": blocks,
                "input_kinds": [kind],
                "stop_reason": stop,
            }
        )
    return lines


def as_text(lines: list[dict[str, Any]]) -> str:
    return "".join(json.dumps(line, separators=(",", ":")) + "\n" for line in lines)


if __name__ == "__main__":
    SMALL_TRACE.write_text(as_text(make_small_trace()))
