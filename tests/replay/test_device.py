"""Modelled times to the first token."""

from __future__ import annotations

import pytest

from dflash2.replay.device import DeviceModel


def test_without_a_doubling_all_tokens_take_the_same() -> None:
    assert DeviceModel(prefill_tokens_per_s=100.0).ttft_s((0, 0, 0), 500, 10, 1) == pytest.approx(5.0)
    assert DeviceModel(prefill_tokens_per_s=100.0).ttft_s((50, 0, 0), 500, 10, 1) == pytest.approx(0.01)


def test_tokens_deep_in_a_prompt_take_longer() -> None:
    device = DeviceModel(prefill_tokens_per_s=100.0, prefill_doubles_at=1000.0)
    whole, deep = device.ttft_s((0, 0, 0), 2000, 10, 1), device.ttft_s((100, 0, 0), 2000, 10, 1)
    assert whole == pytest.approx(40.0, rel=0.01)
    assert deep == pytest.approx(25.0, rel=0.01)
