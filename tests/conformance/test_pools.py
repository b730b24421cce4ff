from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.conformance.pool_suite import PoolSuite
from tests.pools.blocks import POOLS

from dflash2.pools.base import BlockPool
from dflash2.pools.wrappers import DelayPool, FailPool, LimitPool, PoolWrapper


@pytest.mark.parametrize("kind", POOLS)
class TestPools(PoolSuite):
    @pytest.fixture
    def pool(self, kind: str, tmp_path: Path) -> Iterator[BlockPool]:
        pool = POOLS[kind](tmp_path)
        yield pool
        pool.close()


class TestWrappersThatDoNothing(PoolSuite):
    @pytest.fixture
    def pool(self, tmp_path: Path) -> Iterator[BlockPool]:
        inner = LimitPool(FailPool(DelayPool(POOLS["nvme"](tmp_path)), lambda *_: False), 10_000)
        yield PoolWrapper(inner)
        inner.close()
