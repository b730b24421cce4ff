"""Bytes that follow from an integer key, without torch: for processes that are killed."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from dflash2.types import KEY_BYTES, ByteArray, IntArray, KVLayout

FINGERPRINT = b"model-a".ljust(32, b"\0")


def slots_of(values: Sequence[int]) -> IntArray:
    return np.array(values, dtype=np.int32)


def keys_of(values: Sequence[int]) -> ByteArray:
    """uint8 ``[n, KEY_BYTES]``, distinct for distinct integers."""
    return np.array([np.frombuffer(b"%032d" % v, dtype=np.uint8) for v in values]).reshape(len(values), KEY_BYTES)


def key_number(key: ByteArray) -> int:
    """The integer that ``keys_of`` made this key from."""
    return int(key.tobytes())


def payload(key: int, layout: KVLayout) -> ByteArray:
    """The bytes of the block ``key``."""
    return np.random.default_rng(key).integers(0, 256, layout.block_bytes, dtype=np.uint8)
