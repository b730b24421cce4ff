"""Folders that ranks of an earlier run left: a run with fewer ranks would otherwise never give their space back."""

from __future__ import annotations

import fcntl
import logging
import os
import re
from pathlib import Path

log = logging.getLogger(__name__)

FILES = ("data", "index")
"""Of a rank, besides its lock."""


def rank_folder(rank: int) -> str:
    """Name of the folder of a rank under ``memory.nvme_path``."""
    return f"rank{rank}"


def reclaim_dead_ranks(directory: Path, world_size: int) -> int:
    """Remove the files of ranks that this run does not have, unless a process still owns them.

    Only folders of this user with the names and files of a rank are touched, and nothing else in them.

    Args:
        directory: ``memory.nvme_path``, existing.
        world_size: ranks of this run, numbered from 0.

    Returns:
        Bytes given back to the file system.
    """
    freed = 0
    for folder in sorted(directory.iterdir()):
        number = re.fullmatch(r"rank(\d+)", folder.name)
        if number is not None and int(number[1]) >= world_size and _is_ours(folder):
            freed += _reclaim(folder)
    return freed


def _is_ours(folder: Path) -> bool:
    return folder.is_dir() and not folder.is_symlink() and folder.lstat().st_uid == os.geteuid()


def _reclaim(folder: Path) -> int:
    """Bytes given back; 0 if the folder has no lock file, or somebody holds it."""
    try:
        fd = os.open(folder / "lock", os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return 0  # not a rank's folder
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        freed = 0
        for path in (folder / name for name in FILES):
            if path.exists():
                freed += path.lstat().st_blocks * 512
                path.unlink()
    except OSError as error:
        log.info("%s is left alone: %s", folder, error.strerror)
        return 0
    finally:
        os.close(fd)
    log.warning("%s is of an earlier run with more ranks; its %.2f GB are free again", folder, freed / 1e9)
    return freed
