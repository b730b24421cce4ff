"""A text is tokenised whenever it comes, also in the moment in which the last worker leaves."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest
from tests.pipeline.tiny_tokenizer import tiny_hf_tokenizer

from dflash2.pipeline.tokenise_stage import TokeniseStage
from dflash2.pipeline.tokenizer import LONG_TEXT_CHARS, Tokenizer


@pytest.fixture
def tokenizer() -> Iterator[Tokenizer]:
    tokenizer = Tokenizer(tiny_hf_tokenizer(), num_threads=1)
    yield tokenizer
    tokenizer.close()


@pytest.mark.parametrize("length", [3, LONG_TEXT_CHARS + 1])
def test_one_text_right_behind_the_other(tokenizer: Tokenizer, length: int) -> None:
    async def main() -> None:
        stage = TokeniseStage(tokenizer)
        for number in range(5):
            tokens = await stage.encode("x" * (length + number), add_special_tokens=False)
            assert len(tokens) == length + number
        assert stage.meter.done == 5 and stage.meter.queued == stage.meter.active == 0

    asyncio.run(asyncio.wait_for(main(), 60))
