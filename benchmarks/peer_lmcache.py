"""LMCache's CPU and disk backends against the limits of this machine. Run by ``transfer.py --peers``, not by hand.

    python peer_lmcache.py DIRECTORY SIZE_MB REPEATS BLOCK_KIB...

Runs in an environment of its own (LMCache, torch, NumPy) and prints one JSON object. "put" is what swapping a block out
takes: allocate, copy, submit, and for the disk wait until it is written; "get" is the way back. Both backends are told
to use what is good for them: several threads and O_DIRECT for the disk.
"""

from __future__ import annotations

import asyncio
import importlib.metadata
import json
import logging
import os
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

os.environ.setdefault("LMCACHE_LOG_LEVEL", "ERROR")
os.environ.setdefault("LMCACHE_TRACK_USAGE", "false")

import torch
from limits import MIB, DiskLimit, MemcpyLimit, seconds
from lmcache.utils import CacheEngineKey
from lmcache.v1.config import LMCacheEngineConfig
from lmcache.v1.memory_management import MemoryFormat
from lmcache.v1.metadata import LMCacheMetadata
from lmcache.v1.storage_backend.local_cpu_backend import LocalCPUBackend
from lmcache.v1.storage_backend.local_disk_backend import LocalDiskBackend

IO_THREADS = 8


class Peer:
    """Both backends over blocks of one size.

    Args:
        directory: for the disk backend.
        block_bytes: of a block.
        count: blocks moved in one go.
    """

    def __init__(self, directory: Path, block_bytes: int, count: int) -> None:
        gib = 6 * count * block_bytes / 2**30 + 0.25
        config = LMCacheEngineConfig.from_defaults(
            chunk_size=256,
            local_cpu=True,
            max_local_cpu_size=gib,
            local_disk=str(directory),
            max_local_disk_size=gib,
            extra_config={"use_odirect": True, "disk_io_threads": IO_THREADS},
        )
        self.shape = torch.Size([2, 1, 256, block_bytes // 512])
        metadata = LMCacheMetadata("m", 1, 1, 0, 0, torch.uint8, (1, 2, 256, 1, block_bytes // 512))
        self.loop = asyncio.new_event_loop()
        threading.Thread(target=self.loop.run_forever, daemon=True).start()
        self.cpu = LocalCPUBackend(config, metadata, "cpu")
        self.disk = LocalDiskBackend(config, self.loop, self.cpu, "cpu", metadata=metadata)
        self.hbm = torch.randint(0, 256, (count, *self.shape), dtype=torch.uint8)
        self.back = torch.zeros_like(self.hbm)
        self.keys = [CacheEngineKey("m", 1, 0, number + 1, torch.uint8) for number in range(count)]

    def copy_out(self) -> list:
        objects = []
        for block in self.hbm:
            memory = self.cpu.allocate(self.shape, torch.uint8, MemoryFormat.KV_2LTD)
            if memory is None:
                raise RuntimeError("the peer's memory is too small")
            memory.tensor.copy_(block)
            objects.append(memory)
        return objects

    def put_cpu(self) -> None:
        for key, memory in zip(self.keys, self.copy_out(), strict=True):
            self.cpu.submit_put_task(key, memory)
            memory.ref_count_down()

    def get_cpu(self) -> None:
        for key, block in zip(self.keys, self.back, strict=True):
            memory = self.cpu.get_blocking(key)
            block.copy_(memory.tensor)
            memory.ref_count_down()

    def forget_cpu(self) -> None:
        for key in self.keys:
            self.cpu.remove(key)

    def put_disk(self, objects: list) -> None:
        self.disk.batched_submit_put_task(self.keys, objects)
        while any(self.disk.exists_in_put_tasks(key) for key in self.keys):
            time.sleep(0.0005)

    def get_disk(self) -> None:
        for memory in self.disk.batched_get_blocking(self.keys):
            if memory is None:
                raise RuntimeError("the peer lost a block")
            memory.ref_count_down()

    def forget_disk(self) -> None:
        for key in self.keys:
            self.disk.remove(key)


def measure(
    directory: Path, block_bytes: int, nbytes: int, repeats: int, limits: dict[str, Callable[[], float]]
) -> list:
    count = max(1, nbytes // block_bytes)
    peer = Peer(directory, block_bytes, count)
    moved = count * block_bytes
    speeds: dict[tuple[str, str, str], list[tuple[float, float]]] = {}

    def note(backend: str, route: str, limit: str, took_s: float, limit_gb_s: float) -> None:
        speeds.setdefault((backend, route, limit), []).append((moved / took_s / 1e9, limit_gb_s))

    for repeat in range(repeats + 1):
        memcpy = limits["memcpy"]()
        put = seconds(peer.put_cpu)
        get = seconds(peer.get_cpu)
        if not torch.equal(peer.back, peer.hbm):
            raise RuntimeError("the peer gave wrong bytes back")
        peer.forget_cpu()
        objects = peer.copy_out()
        write = limits["disk write"]()
        put_disk = seconds(lambda objects=objects: peer.put_disk(objects))
        for memory in objects:
            memory.ref_count_down()
        read = limits["disk read"]()
        get_disk = seconds(peer.get_disk)
        peer.forget_disk()
        if repeat:  # the first one warms up
            note("cpu", "hbm>dram", "memcpy", put, memcpy)
            note("cpu", "dram>hbm", "memcpy", get, memcpy)
            note("disk", "dram>nvme", "disk write", put_disk, write)
            note("disk", "nvme>dram", "disk read", get_disk, read)
    return [
        {
            "name": "LMCache",
            "version": importlib.metadata.version("lmcache"),
            "backend": backend,
            "route": route,
            "block_bytes": block_bytes,
            "gb_s": round(statistics.median(speed for speed, _ in pairs), 2),
            "limit_gb_s": round(statistics.median(limit for _, limit in pairs), 2),
            "ratio": round(statistics.median(speed / limit for speed, limit in pairs), 3),
            "checksum": None,
        }
        for (backend, route, _), pairs in speeds.items()
    ]


def main() -> int:
    logging.disable(logging.CRITICAL)
    parent, size_mb, repeats, *block_kib = sys.argv[1:]
    nbytes = int(size_mb) * MIB
    rows = []
    with tempfile.TemporaryDirectory(dir=parent) as folder, ThreadPoolExecutor(8) as threads:
        directory = Path(folder)
        disk = DiskLimit(directory, nbytes, threads)
        limits = {
            "memcpy": MemcpyLimit(nbytes, threads).gb_s,
            "disk write": disk.write_gb_s,
            "disk read": disk.read_gb_s,
        }
        for kib in map(int, block_kib):
            rows += measure(directory / str(kib), kib * 1024, nbytes, int(repeats), limits)
        disk.close()
    print("RESULT " + json.dumps(rows), flush=True)
    os._exit(0)  # its threads do not end by themselves


if __name__ == "__main__":
    main()
