"""How requests wait for blocks from NVMe, by a clock of its own."""

from __future__ import annotations

from dflash2.integrations.sglang.nvme_waits import HOLD_S, PATIENCE_S, NvmeWaits, Wait


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_a_request_holds_up_others_for_a_moment_is_passed_then_and_gives_up_at_last() -> None:
    clock = Clock()
    waits = NvmeWaits(clock)
    assert waits.of("r") == Wait.NOT
    waits.note("r", started=True)
    assert waits.of("r") == Wait.HOLDS
    clock.now = HOLD_S
    waits.note("r", started=True)  # asked about again: it started when it started
    assert waits.of("r") == Wait.PASSED
    clock.now = PATIENCE_S
    assert not waits.gave_up("r")
    assert waits.of("r") == Wait.NOT
    assert waits.gave_up("r")
    waits.forget("r")
    assert not waits.gave_up("r")


def test_one_whose_blocks_have_no_room_yet_is_passed_and_keeps_its_patience() -> None:
    clock = Clock()
    waits = NvmeWaits(clock)
    waits.note("r", started=False)
    clock.now = 2 * PATIENCE_S
    assert waits.of("r") == Wait.PASSED
    waits.note("r", started=True)
    assert waits.of("r") == Wait.HOLDS
    waits.over("r")
    assert waits.of("r") == Wait.NOT
