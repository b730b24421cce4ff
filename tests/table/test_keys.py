"""Cases T7, T8 and T10: what must differ differs, what must be equal is equal, everywhere."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import fields, replace
from itertools import combinations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from dflash2.table.keys import KeyNamespace, chain, next_key
from dflash2.types import KEY_BYTES

BASE = KeyNamespace(model="A", weights_version="v1", dtype="bfloat16", block_size=16)
TOKENS = np.arange(64, dtype=np.int32)
tokens_of = st.lists(st.integers(0, 3), max_size=12).map(lambda values: np.array(values, np.int32))


def test_settings_that_differ_never_share_a_key() -> None:
    spaces = [
        BASE,
        replace(BASE, model="B"),
        replace(BASE, dtype="float8_e4m3fn"),
        replace(BASE, block_size=32),
        replace(BASE, world_size=2),
        replace(BASE, world_size=2, rank=1),
        replace(BASE, weights_version="v2"),
        replace(BASE, kv_quantization=""),
        replace(BASE, kv_quantization="int8"),
        replace(BASE, layout_version=BASE.layout_version + 1),
    ]
    roots = [
        space.root(adapter, salt) for space in spaces for adapter in (None, "", "a", "b") for salt in (None, "", "t1")
    ]
    keys = [next_key(root, TOKENS[:16]) for root in roots]
    assert len(keys) == 120
    assert all(one != other for one, other in combinations(keys, 2))
    assert all(len(key) == KEY_BYTES for key in keys)


def test_every_field_of_the_namespace_counts() -> None:
    for field in fields(KeyNamespace):
        value = getattr(BASE, field.name)
        other = value + 1 if isinstance(value, int) else f"{value}x"
        assert replace(BASE, **{field.name: other}).root() != BASE.root(), field.name


def test_equal_settings_and_tokens_give_equal_keys() -> None:
    twin = KeyNamespace(model="A", weights_version="v1", dtype="bfloat16", block_size=16)
    assert chain(BASE.root("a", "s"), TOKENS, 16) == chain(twin.root("a", "s"), TOKENS.copy(), 16)


def test_fields_cannot_be_forged_into_one_another() -> None:
    assert BASE.root(adapter="X") != BASE.root(tenant_salt="X")
    assert BASE.root("ab", "c") != BASE.root("a", "bc")
    assert BASE.root("a\0tenant_salt", None) != BASE.root("a", None)
    assert (
        replace(BASE, model="A1", weights_version="2").root() != replace(BASE, model="A", weights_version="12").root()
    )
    # A number and its spelling, an absent value and the word for it.
    assert BASE.root(adapter="None") != BASE.root(adapter=None)


@given(tokens_of, tokens_of)
def test_a_key_stands_for_all_tokens_before_it(one: np.ndarray, other: np.ndarray) -> None:
    keys, others = chain(BASE.root(), one, 2), chain(BASE.root(), other, 2)
    assert len(keys) == len(one) // 2
    for i, (key, another) in enumerate(zip(keys, others, strict=False)):
        assert (key == another) == (one[: 2 * i + 2].tolist() == other[: 2 * i + 2].tolist())


@given(tokens_of, st.integers(0, 6))
def test_a_chain_can_be_continued_anywhere(tokens: np.ndarray, first: int) -> None:
    whole = chain(BASE.root(), tokens, 2)
    parent = BASE.root() if first == 0 else whole[min(first, len(whole)) - 1] if whole else BASE.root()
    assert chain(parent, tokens, 2, min(first, len(whole))) == whole[min(first, len(whole)) :]


def test_block_boundaries_count() -> None:
    assert next_key(next_key(BASE.root(), TOKENS[:8]), TOKENS[8:16]) != next_key(BASE.root(), TOKENS[:16])


def test_keys_are_the_same_in_every_process() -> None:
    program = (
        "import numpy as np; from dflash2.table.keys import KeyNamespace, chain;"
        "space = KeyNamespace(model='A', weights_version='v1', dtype='bfloat16', block_size=16, kv_quantization=None);"
        "print([key.hex() for root in (space.root(), space.root('a', 's'))"
        " for key in chain(root, np.arange(64, dtype=np.int32), 16)])"
    )
    answers = {
        subprocess.run(
            [sys.executable, "-c", program],
            env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": os.pathsep.join(sys.path)},
            capture_output=True,
            text=True,
            check=True,
            timeout=60,
        ).stdout.strip()
        for seed in ("0", "1", "77")
    }
    here = [key.hex() for root in (BASE.root(), BASE.root("a", "s")) for key in chain(root, TOKENS, 16)]
    assert answers == {str(here)}


def test_keys_do_not_change_between_versions() -> None:
    """Stored blocks are found by them. Whoever changes this value must raise LAYOUT_VERSION."""
    assert next_key(BASE.root(), TOKENS[:16]).hex()[:16] == "278fd137eab9035f"
