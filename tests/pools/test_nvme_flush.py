"""What a flush asks of the NVMe pool: gone for everybody, or gone for every later run."""

from __future__ import annotations

import errno
from pathlib import Path

import numpy as np
from tests.pools.blocks import assert_blocks, new_rows, nvme_pool, payload, read_blocks, slots_of, write_blocks

from dflash2.pools.file_wrappers import FailingFiles, FileCall
from dflash2.pools.fileops import OsFileOps
from dflash2.pools.nvme import NvmeOptions
from dflash2.types import KEY_BYTES


def test_a_block_without_its_key_is_read_now_and_never_found_again(tmp_path: Path) -> None:
    pool = nvme_pool(tmp_path)
    write_blocks(pool, range(6), range(6))
    assert pool.disown(slots_of([1, 4, 9])).tolist() == [True, True, False]
    assert_blocks(pool, range(6), range(6))
    assert read_blocks(pool, [1], [1]) == [None], "under its old key it is not known any more"
    pool.check_integrity()
    pool.close()
    again = nvme_pool(tmp_path)
    assert sorted(again.recover().slots.tolist()) == [0, 2, 3, 5]
    again.close()


def test_a_slot_whose_key_the_disk_keeps_is_given_up(tmp_path: Path) -> None:
    refuses = False

    def header_writes(call: FileCall) -> bool:
        return refuses and call.operation == "write" and not call.is_payload

    files = FailingFiles(OsFileOps(), header_writes, errno.EIO)
    pool = nvme_pool(tmp_path, options=NvmeOptions(files=files))
    write_blocks(pool, [2, 3], [2, 3])
    refuses = True
    assert pool.disown(slots_of([2])).tolist() == [False]
    assert pool.quarantined_slots.tolist() == [2] and pool.num_quarantined == 1
    assert read_blocks(pool, [2]) == [None]
    assert_blocks(pool, [3], [3])
    pool.close()


def test_a_key_of_zeros_is_no_key(tmp_path: Path) -> None:
    pool = nvme_pool(tmp_path)
    rows = new_rows(1, pool.layout)
    rows[0, : pool.layout.block_bytes] = payload(7)
    nothing = np.zeros((1, KEY_BYTES), np.uint8)
    assert pool.scatter(slots_of([5]), rows, slots_of([0]), nothing).tolist() == [True]
    # A block that was taken out of the index since it was stored is asked for without a key: its holder still needs it.
    write_blocks(pool, [6], [6])
    assert pool.gather(slots_of([5, 6]), new_rows(2, pool.layout), slots_of([0, 1]), nothing.repeat(2, 0)).all()
    pool.close()
    again = nvme_pool(tmp_path)
    assert again.recover().slots.tolist() == [6]
    again.close()
