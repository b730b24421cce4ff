from __future__ import annotations

import numpy as np
import pytest

from dflash2.errors import IntegrityError
from dflash2.table.page_table import BlockState, PageTable
from dflash2.table.prefix_index import PrefixIndex
from dflash2.types import IntArray, Tier

A, B, C, D, X = b"a", b"b", b"c", b"d", b"x"


class Tree:
    """A table and an index; ``publish`` makes one sealed block in HBM and publishes it."""

    def __init__(self) -> None:
        self.table = PageTable({Tier.HBM: 8})
        self.index = PrefixIndex(self.table)

    def block(self) -> int:
        ids = self.table.try_allocate(1)
        slots = self.table.tiers[Tier.HBM].try_take(1)
        assert ids is not None and slots is not None
        self.table.place(ids, Tier.HBM, slots)
        self.table.settle(ids, Tier.HBM)
        self.table.state[ids] = BlockState.SEALED
        return int(ids[0])

    def publish(self, key: bytes, parent: bytes = b"", position: int = 0) -> int:
        block_id = self.block()
        assert self.index.try_publish(block_id, key, parent, position)
        self.index.check_integrity()
        return block_id


@pytest.fixture
def tree() -> Tree:
    return Tree()


def test_the_walk_ends_at_the_first_block_that_is_missing(tree: Tree) -> None:
    a, b = tree.publish(A), tree.publish(B, A, 1)
    tree.publish(C, B, 2)
    assert tree.index.longest_prefix([A, B, X, C]).tolist() == [a, b]
    assert tree.index.longest_prefix([X, A]).tolist() == []
    assert tree.index.longest_prefix([]).dtype == np.int32


def test_a_block_without_any_copy_is_a_hole(tree: Tree) -> None:
    a, b = tree.publish(A), tree.publish(B, A, 1)
    tree.publish(C, B, 2)
    tree.table.drop(np.array([b], np.int32), Tier.HBM)
    assert tree.index.longest_prefix([A, B, C]).tolist() == [a]


def test_a_block_is_refused_while_its_parent_is_not_published(tree: Tree) -> None:
    block_id = tree.block()
    assert not tree.index.try_publish(block_id, B, A, 1)
    assert tree.table.state[block_id] == BlockState.SEALED and tree.index.get(B) is None
    tree.publish(A)
    assert tree.index.try_publish(block_id, B, A, 1)
    tree.index.check_integrity()


def test_a_key_belongs_to_the_first_that_published_it(tree: Tree) -> None:
    first, second = tree.publish(A), tree.block()
    assert not tree.index.try_publish(second, A, b"", 0)
    assert tree.index.get(A) == first and tree.index.key_of(second) is None
    tree.index.check_integrity()


def test_unpublishing_takes_all_followers_along(tree: Tree) -> None:
    a, b = tree.publish(A), tree.publish(B, A, 1)
    c, d = tree.publish(C, B, 2), tree.publish(D, B, 2)
    x = tree.publish(X, A, 1)
    taken = tree.index.unpublish(b)
    assert taken[0] == b and set(taken) == {b, c, d}
    assert (tree.table.state[taken] == BlockState.SEALED).all()
    assert [tree.index.get(key) for key in (A, B, C, D, X)] == [a, None, None, None, x]
    assert tree.table.num_children[a] == 1
    tree.index.check_integrity()


def test_a_head_that_returns_can_have_followers_again(tree: Tree) -> None:
    a = tree.publish(A)
    tree.publish(B, A, 1)
    tree.index.unpublish(a)
    assert len(tree.index) == 0
    tree.publish(A)
    tree.publish(B, A, 1)
    assert len(tree.index) == 2


def test_adopted_blocks_are_found_and_can_have_followers(tree: Tree) -> None:
    """After a restart the parent of a block is not known; the walk from the head still finds it."""
    a, b = tree.block(), tree.block()
    tree.index.adopt(b, B)
    tree.index.adopt(a, A)
    tree.index.check_integrity()
    c = tree.publish(C, B, 2)
    assert tree.index.longest_prefix([A, B, C]).tolist() == [a, b, c]
    assert set(tree.index.unpublish(b)) == {b, c}
    tree.index.check_integrity()


def test_clear_forgets_everything(tree: Tree) -> None:
    tree.publish(A)
    tree.publish(B, A, 1)
    tree.index.clear()
    assert len(tree.index) == 0 and not (tree.table.state == BlockState.PUBLISHED).any()
    tree.index.check_integrity()


@pytest.mark.parametrize("damage", ["state", "children", "parent"])
def test_damage_is_noticed(tree: Tree, damage: str) -> None:
    a = tree.publish(A)
    b = tree.publish(B, A, 1)
    if damage == "state":
        tree.table.state[b] = BlockState.SEALED
    elif damage == "children":
        tree.table.num_children[a] = 2
    else:
        other = tree.block()
        tree.table.parent[b] = other
        tree.table.num_children[a], tree.table.num_children[other] = 0, 1
    with pytest.raises(IntegrityError):
        tree.index.check_integrity()


def blocks(tree: Tree, count: int) -> IntArray:
    return np.array([tree.block() for _ in range(count)], np.int32)


def test_a_chain_is_published_as_far_as_it_hangs_together(tree: Tree) -> None:
    a = tree.publish(A)
    known, new = tree.publish(B, A, 1), blocks(tree, 3)
    assert tree.index.publish_chain(new, [B, C, D], A, 1) == 2
    assert tree.index.longest_prefix([A, B, C, D]).tolist() == [a, known, new[1], new[2]]
    assert tree.table.position[new[1:]].tolist() == [2, 3]
    assert tree.table.state[new[0]] == BlockState.SEALED
    assert tree.index.publish_chain(blocks(tree, 1), [X], b"unknown", 4) == 0
    tree.index.check_integrity()


def test_ends_are_blocks_whose_followers_are_all_there(tree: Tree) -> None:
    a, b, c, d = tree.publish(A), tree.publish(B, A, 1), tree.publish(C, B, 2), tree.publish(D, B, 2)
    ids = np.array([a, c, b, d], np.int32)
    assert tree.index.ends_among(ids).tolist() == [True, True, True, True]
    assert tree.index.ends_among(ids[:3]).tolist() == [False, True, False]
    assert tree.index.ends_among(ids[:0]).tolist() == []
    tree.index.unpublish_ends(np.array([d, b, c], np.int32))
    assert tree.index.longest_prefix([A, B]).tolist() == [a] and tree.table.num_children[a] == 0
    tree.index.check_integrity()
