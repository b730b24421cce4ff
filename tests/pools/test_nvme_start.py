"""Start of the NVMe tier: ownership, format, space, and what an earlier run left."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from tests.pools.blocks import (
    FINGERPRINT,
    LAYOUT,
    assert_blocks,
    keys_of,
    nvme_pool,
    read_blocks,
    slots_of,
    write_blocks,
)

import dflash2.pools.nvme_files as nvme_files
from dflash2.errors import StorageError
from dflash2.pools.nvme import NvmeOptions, NvmePool
from dflash2.pools.nvme_format import FORMAT_VERSION, HEADER_BYTES
from dflash2.types import PAGE_BYTES, KVLayout


def recovered(pool: NvmePool) -> dict[bytes, int]:
    found = pool.recover()
    return {key.tobytes(): slot for slot, key in zip(found.slots.tolist(), found.keys, strict=True)}


def test_files_are_private_preallocated_and_bounded(tmp_path: Path) -> None:
    pool = nvme_pool(tmp_path, num_slots=100)
    folder = tmp_path / "rank0"
    assert folder.stat().st_mode & 0o777 == 0o700
    assert sorted(path.name for path in folder.iterdir()) == ["data", "index", "lock"]
    for path in folder.iterdir():
        assert path.stat().st_mode & 0o777 == 0o600
    size = (folder / "data").stat().st_size
    assert size == PAGE_BYTES + 100 * LAYOUT.stride_bytes
    assert (folder / "data").stat().st_blocks * 512 >= size
    for _ in range(3):
        write_blocks(pool, range(100), range(100))
    assert (folder / "data").stat().st_size == size
    assert pool.bytes_on_disk <= size + 100 * HEADER_BYTES + 4 * PAGE_BYTES
    pool.close()


def test_a_restart_finds_every_complete_block(tmp_path: Path) -> None:
    pool = nvme_pool(tmp_path)
    write_blocks(pool, [3, 9, 4], [30, 90, 40])
    write_blocks(pool, [7], [70], with_keys=False)
    pool.close()
    again = nvme_pool(tmp_path)
    assert recovered(again) == {keys_of([k])[0].tobytes(): slot for k, slot in ((30, 3), (90, 9), (40, 4))}
    assert_blocks(again, [3, 9, 4], [30, 90, 40])
    assert read_blocks(again, [7]) == [None]
    assert again.stale.num_blocks == 0
    again.check_integrity()
    again.close()


def test_of_two_copies_of_a_key_the_newer_one_is_found(tmp_path: Path) -> None:
    pool = nvme_pool(tmp_path)
    write_blocks(pool, [1], [5])
    write_blocks(pool, [2], [6])
    write_blocks(pool, [0], [5])
    pool.close()
    again = nvme_pool(tmp_path)
    assert again.recover().slots.tolist() == [2, 0]
    assert read_blocks(again, [1]) == [None]
    again.check_integrity()
    again.close()


def test_generations_go_on_after_a_restart(tmp_path: Path) -> None:
    for slot in (4, 3, 2):
        pool = nvme_pool(tmp_path)
        write_blocks(pool, [slot], [1])
        pool.close()
    again = nvme_pool(tmp_path)
    assert again.recover().slots.tolist() == [2]
    again.close()


def test_what_was_discarded_stays_away(tmp_path: Path) -> None:
    pool = nvme_pool(tmp_path)
    write_blocks(pool, [1, 2, 3], [1, 2, 3])
    assert pool.discard(slots_of([1, 3])).all()
    assert read_blocks(pool, [1]) == [None]
    assert_blocks(pool, [2], [2])
    pool.close()
    again = nvme_pool(tmp_path)
    assert again.recover().slots.tolist() == [2]
    again.close()


def test_a_torn_header_is_no_block(tmp_path: Path) -> None:
    pool = nvme_pool(tmp_path)
    write_blocks(pool, [1, 2], [1, 2])
    pool.close()
    with (tmp_path / "rank0" / "index").open("r+b") as file:
        file.seek(PAGE_BYTES + 1 * HEADER_BYTES + 40)  # inside the generation
        file.write(b"\xff\xff")
    again = nvme_pool(tmp_path)
    assert again.recover().slots.tolist() == [2]
    again.close()


@pytest.mark.parametrize(
    ("fingerprint", "layout"),
    [
        (b"model-b".ljust(32, b"\0"), LAYOUT),
        (FINGERPRINT, KVLayout(2, 3, 5, 8, "float32")),
        (FINGERPRINT, KVLayout(40, 3, 5, 8, "float32")),
    ],
    ids=["fingerprint", "payload", "stride"],
)
def test_blocks_of_another_layout_are_stale_and_reclaimed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, fingerprint: bytes, layout: KVLayout
) -> None:
    pool = nvme_pool(tmp_path)
    write_blocks(pool, [1, 2, 3], [1, 2, 3])
    pool.close()
    with caplog.at_level(logging.WARNING):
        other = nvme_pool(tmp_path, fingerprint=fingerprint, layout=layout)
    assert (other.stale.num_blocks, other.stale.num_bytes) == (3, 3 * LAYOUT.stride_bytes)
    assert "3 stale blocks" in caplog.text
    assert len(other.recover().slots) == 0
    assert read_blocks(other, [1, 2, 3]) == [None, None, None]
    write_blocks(other, [1], [1])
    other.close()
    back = nvme_pool(tmp_path)
    assert len(back.recover().slots) == 0
    back.close()


@pytest.mark.parametrize("num_slots", [4, 40])
def test_another_capacity_keeps_what_fits(tmp_path: Path, num_slots: int) -> None:
    pool = nvme_pool(tmp_path)
    write_blocks(pool, [1, 3, 12], [1, 3, 12])
    pool.close()
    resized = nvme_pool(tmp_path, num_slots=num_slots)
    kept = [slot for slot in (1, 3, 12) if slot < num_slots]
    assert resized.recover().slots.tolist() == kept
    assert_blocks(resized, kept, kept)
    assert (tmp_path / "rank0" / "data").stat().st_size == PAGE_BYTES + num_slots * LAYOUT.stride_bytes
    resized.close()
    grown = nvme_pool(tmp_path)
    assert grown.recover().slots.tolist() == kept
    grown.close()


def test_a_second_live_owner_is_refused_even_in_another_process(tmp_path: Path) -> None:
    pool = nvme_pool(tmp_path)
    with pytest.raises(StorageError, match=f"in use by process {os.getpid()}"):
        nvme_pool(tmp_path)
    code = (
        "import sys; from tests.pools.blocks import nvme_pool; from pathlib import Path\n"
        "from dflash2.errors import StorageError\n"
        "try: nvme_pool(Path(sys.argv[1]))\n"
        "except StorageError as e: print(e); sys.exit(7)\n"
    )
    root = str(Path(__file__).parents[2])
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([root, *filter(None, sys.path)])}
    other = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, timeout=60, check=False, env=env
    )
    assert other.returncode == 7, other.stderr
    assert "in use by process" in other.stdout
    pool.close()
    nvme_pool(tmp_path).close()


def test_ranks_do_not_mix_also_after_both_restart(tmp_path: Path) -> None:
    ranks = [nvme_pool(tmp_path, name=f"rank{rank}") for rank in range(2)]
    for rank, pool in enumerate(ranks):
        write_blocks(pool, [5], [1])
        write_blocks(pool, [6], [100 + rank])
    for pool in ranks:
        pool.close()
    for rank in (1, 0):
        pool = nvme_pool(tmp_path, name=f"rank{rank}")
        assert_blocks(pool, [5, 6], [1, 100 + rank])
        pool.close()


def test_files_of_another_format_or_origin_are_refused_and_left_alone(tmp_path: Path) -> None:
    pool = nvme_pool(tmp_path)
    write_blocks(pool, [1], [1])
    pool.close()
    index = tmp_path / "rank0" / "index"
    original = index.read_bytes()
    for offset, changed, words in (
        (8, (FORMAT_VERSION + 1).to_bytes(4, "little"), "format 2"),
        (0, b"SOMEBODY", "not a DFlash2 block file"),
        (40, b"\xff", "damaged first page"),
    ):
        spoilt = original[:offset] + changed + original[offset + len(changed) :]
        index.write_bytes(spoilt)
        with pytest.raises(StorageError, match=words):
            nvme_pool(tmp_path)
        assert index.read_bytes() == spoilt
    index.write_bytes(original)
    again = nvme_pool(tmp_path)
    assert_blocks(again, [1], [1])
    again.close()


def test_files_put_together_from_two_pools_are_not_believed(tmp_path: Path) -> None:
    for name, key in (("rank0", 1), ("rank1", 2)):
        pool = nvme_pool(tmp_path, name=name)
        write_blocks(pool, [1], [key])
        pool.close()
    (tmp_path / "rank1" / "data").replace(tmp_path / "rank0" / "data")
    mixed = nvme_pool(tmp_path)
    assert len(mixed.recover().slots) == 0
    mixed.close()


def test_another_users_files_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nvme_pool(tmp_path).close()
    me = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: me + 1)
    with pytest.raises(StorageError, match=f"belongs to user {me}"):
        nvme_pool(tmp_path)


def test_a_link_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "rank0").mkdir()
    victim = tmp_path / "victim"
    victim.write_bytes(b"precious")
    (tmp_path / "rank0" / "index").symlink_to(victim)
    with pytest.raises(StorageError, match="cannot open"):
        nvme_pool(tmp_path)
    assert victim.read_bytes() == b"precious"


def test_paths_that_cannot_be_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(StorageError, match=f"did you mean {tmp_path}/kv"):
        nvme_pool(Path("kv"))
    with pytest.raises(StorageError, match="is not a directory; create it"):
        nvme_pool(tmp_path / "missing")
    (tmp_path / "file").touch()
    with pytest.raises(StorageError, match="is not a directory"):
        nvme_pool(tmp_path / "file")
    with pytest.raises(StorageError, match="cannot create"):
        nvme_pool(Path("/proc"))
    for name in ("", "../up", ".hidden"):
        with pytest.raises(StorageError, match="plain name"):
            nvme_pool(tmp_path, name=name)


def test_too_little_space_fails_at_start_and_says_how_much(tmp_path: Path) -> None:
    huge = 1 << 50
    with pytest.raises(StorageError, match=rf"{huge + PAGE_BYTES} bytes needed|not enough space.*needed.*free"):
        nvme_pool(tmp_path, num_slots=1 << 20, layout=KVLayout(64, 128, 512, 128, "bfloat16"))
    # Nothing stays locked or taken by the failed start.
    nvme_pool(tmp_path).close()


def test_the_floor_of_free_space_counts_but_not_for_what_is_ours_already(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nvme_files, "_free_bytes", lambda fd: 1_000_000)
    options = NvmeOptions(free_space_floor_bytes=950_000)
    with pytest.raises(StorageError, match="950000 must stay free, 1000000 free"):
        nvme_pool(tmp_path, options=options)
    nvme_pool(tmp_path).close()
    nvme_pool(tmp_path, options=options).close()  # allocated by the run before: needs nothing more


def test_a_refused_allocation_is_an_error_at_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(fd: int, offset: int, length: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    with pytest.raises(StorageError, match=r"cannot reserve .* No space left"):
        nvme_pool(tmp_path)


def test_without_direct_io_it_works_buffered_and_says_so_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    real_open = os.open

    def no_direct(path: str, flags: int, mode: int = 0o777) -> int:
        if flags & os.O_DIRECT:
            raise OSError(22, "Invalid argument")
        return real_open(path, flags, mode)

    monkeypatch.setattr(os, "open", no_direct)
    folders = [tmp_path / "a", tmp_path / "b"]
    for folder in folders:
        folder.mkdir()
    with caplog.at_level(logging.WARNING):
        pool = NvmePool(folders, "rank0", 8, LAYOUT, FINGERPRINT)
    assert pool.io_mode == "buffered"
    assert caplog.text.count("does not take direct I/O") == 1
    write_blocks(pool, range(8), range(8))
    assert_blocks(pool, range(8), range(8))
    pool.close()


def test_a_buffer_that_is_not_aligned_is_bounced(tmp_path: Path) -> None:
    pool = nvme_pool(tmp_path)
    stride = LAYOUT.stride_bytes
    raw = np.zeros(3 * stride + 8192, dtype=np.uint8)
    shift = (-raw.ctypes.data) % PAGE_BYTES + 1
    rows = raw[shift : shift + 3 * stride].reshape(3, stride)
    assert rows.ctypes.data % PAGE_BYTES == 1
    rows[:] = np.arange(3, dtype=np.uint8)[:, None] + 1
    at = slots_of([0, 1, 2])
    assert pool.scatter(slots_of([4, 5, 6]), rows, at, keys_of([1, 2, 3])).all()
    rows[:] = 0
    assert pool.gather(slots_of([6, 4]), rows, slots_of([0, 2]), keys_of([3, 1])).all()
    assert rows[:, : LAYOUT.block_bytes].max(axis=1).tolist() == [3, 0, 1]
    pool.close()


def test_an_interrupted_creation_starts_anew(tmp_path: Path) -> None:
    folder = tmp_path / "rank0"
    folder.mkdir()
    (folder / "index").write_bytes(bytes(PAGE_BYTES))
    (folder / "data").touch()
    pool = nvme_pool(tmp_path)
    write_blocks(pool, [0], [1])
    assert_blocks(pool, [0], [1])
    pool.close()


def test_a_million_slots_cost_three_open_files_and_no_directory_scan(tmp_path: Path) -> None:
    before = len(list(Path("/proc/self/fd").iterdir()))
    tiny = KVLayout(num_layers=1, num_kv_heads=1, head_dim=1, block_size=1, dtype="float32")
    pool = NvmePool([tmp_path], "rank0", 20_000, tiny, FINGERPRINT)
    write_blocks(pool, [19_999], [1])
    assert len(list(Path("/proc/self/fd").iterdir())) - before <= 4
    assert len(list((tmp_path / "rank0").iterdir())) == 3
    pool.close()
    assert len(list(Path("/proc/self/fd").iterdir())) == before
