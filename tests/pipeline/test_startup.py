"""The line that names the active stages."""

from __future__ import annotations

import pytest

from dflash2.config import parse_config
from dflash2.pipeline.startup import startup_line


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (
            '{"enable": true}',
            "validate, tokenise, lookup, estimate, reserved, batch; requests that arrive together are tokenised "
            "together; short requests first; smoothing of order 2",
        ),
        (
            '{"enable": true, "pipeline": {"enabled": false}, "lora": {"directory": "/adapters"}, '
            '"scheduling": {"reserve": "max_tokens", "order": "first_come", "smoothing": false}}',
            "validate, tokenise, adapter, reserved, batch; one by one; first come, first served; no smoothing",
        ),
        ("{}", "validate, tokenise, batch; no reservations, first come, first served"),
    ],
)
def test_it_names_what_is_active(config: str, expected: str) -> None:
    assert startup_line(parse_config(config)) == f"DFlash2: pipeline: {expected}"
