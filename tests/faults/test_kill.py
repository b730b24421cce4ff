"""kill -9 at any moment of demotion and load: what is visible afterwards is whole."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from tests.faults.kill_child import LAYOUT, NUM_SLOTS
from tests.pools.blocks import new_rows
from tests.pools.payloads import FINGERPRINT, key_number, payload, slots_of

from dflash2.pools.nvme import NvmePool


def run_and_kill(directory: Path, seed: int, delay_s: float) -> None:
    root = Path(__file__).parents[2]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(root), *filter(None, sys.path)])}
    command = [sys.executable, str(Path(__file__).with_name("kill_child.py")), str(directory), str(seed)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env) as child:
        assert child.stdout is not None
        assert child.stderr is not None
        said = child.stdout.readline()
        time.sleep(delay_s)
        alive = child.poll() is None
        child.kill()
        errors = child.stderr.read()
    assert said == "ready\n", errors
    assert alive, errors


def visible_blocks_are_whole(directory: Path) -> int:
    """Open what was left, load every block that is offered; how many there were."""
    pool = NvmePool([directory], "rank0", NUM_SLOTS, LAYOUT, FINGERPRINT)
    try:
        found = pool.recover()
        rows = new_rows(len(found.slots), LAYOUT)
        at = slots_of(range(len(found.slots)))
        ok = pool.gather(found.slots, rows, at, found.keys)
        assert ok.all(), f"{int((~ok).sum())} visible blocks cannot be loaded: {pool.fault_counts}"
        for row, key in enumerate(found.keys):
            assert np.array_equal(rows[row, : LAYOUT.block_bytes], payload(key_number(key), LAYOUT))
        pool.check_integrity()
        return len(found.slots)
    finally:
        pool.close()


@pytest.mark.long
def test_every_visible_block_verifies_after_kill_9(tmp_path: Path, test_scale: int) -> None:
    moments = random.Random(11)
    counts, sizes = [], []
    for seed in range(20 * test_scale):
        run_and_kill(tmp_path, seed, moments.uniform(0.0, 0.25))
        counts.append(visible_blocks_are_whole(tmp_path))
        sizes.append(sum(path.stat().st_blocks * 512 for path in (tmp_path / "rank0").iterdir()))
    assert max(counts) > NUM_SLOTS // 4, "the child never got far enough to prove anything"
    # A file system may need a few more pages of its own as preallocated space is first written.
    assert max(sizes) <= sizes[0] + 64 * 1024, "disk use grew"
