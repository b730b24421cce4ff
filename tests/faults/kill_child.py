"""Demotes, loads, overwrites and discards without end; says so on standard output and waits to be killed.

python kill_child.py DIRECTORY SEED
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
from tests.pools.payloads import FINGERPRINT, key_number, keys_of, payload

from dflash2.pools.dram import DramPool
from dflash2.pools.nvme import NvmePool
from dflash2.transfer.base import CopyJob
from dflash2.transfer.engine import ThreadedTransferEngine
from dflash2.types import KVLayout, Tier, Urgency

LAYOUT = KVLayout(num_layers=2, num_kv_heads=2, head_dim=64, block_size=64, dtype="float32")
"""128 KiB a block: long enough to be killed in the middle of one."""
NUM_SLOTS = 48
BATCH = 8


def main(directory: Path, seed: int) -> None:
    rng = np.random.default_rng(seed)
    dram = DramPool(NUM_SLOTS, LAYOUT)
    nvme = NvmePool([directory], "rank0", NUM_SLOTS, LAYOUT, FINGERPRINT)
    engine = ThreadedTransferEngine({Tier.DRAM: dram, Tier.NVME: nvme}, 0, 4, io_threads=3)
    found = nvme.recover()
    stored = {slot: key_number(key) for slot, key in zip(found.slots.tolist(), found.keys, strict=True)}
    print("ready", flush=True)
    next_key = seed * 1_000_000
    while True:
        slots = rng.permutation(NUM_SLOTS)[: 3 * BATCH].astype(np.int32)
        out, back, gone = slots[:BATCH], slots[BATCH : 2 * BATCH], slots[2 * BATCH :]
        fresh = list(range(next_key, next_key + BATCH))
        next_key += BATCH
        for row, key in enumerate(fresh):
            dram.slabs[row, : LAYOUT.block_bytes] = payload(key, LAYOUT)
        rows = np.arange(BATCH, dtype=np.int32)
        jobs = [CopyJob(Tier.DRAM, Tier.NVME, rows, out, Urgency.DEMOTION, keys_of(fresh))]
        back = np.array([slot for slot in back.tolist() if slot in stored], dtype=np.int32)
        old = [stored[slot] for slot in back.tolist()]
        jobs.append(CopyJob(Tier.NVME, Tier.DRAM, back, rows[: len(back)] + BATCH, Urgency.DEMAND, keys_of(old)))
        tickets = [engine.submit(job) for job in jobs]
        nvme.discard(gone)
        if not engine.wait(tickets, 60.0) or not all(done.ok.all() for done in engine.poll()):
            sys.exit("a transfer failed without any fault")
        for row, key in enumerate(old):
            if not np.array_equal(dram.slabs[BATCH + row, : LAYOUT.block_bytes], payload(key, LAYOUT)):
                sys.exit(f"block {key} came back with other bytes")
        stored = {slot: key for slot, key in stored.items() if slot not in gone}
        stored.update(zip(out.tolist(), fresh, strict=True))


if __name__ == "__main__":
    if "torch" in sys.modules:
        sys.exit("torch is not needed here")
    main(Path(sys.argv[1]), int(sys.argv[2]))
