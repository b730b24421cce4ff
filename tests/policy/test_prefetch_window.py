from __future__ import annotations

import pytest

from dflash2.policy.prefetch import JUDGED_AFTER, MAX_WINDOW, PrefetchWindow


def judged(window: PrefetchWindow, share_used: float, *, has_room: bool = True) -> int:
    used = round(JUDGED_AFTER * share_used)
    window.note(used=used, wasted=JUDGED_AFTER - used)
    return window.update(has_room=has_room)


def test_it_widens_to_8_only_while_prefetches_are_used() -> None:
    window = PrefetchWindow(4)
    sizes = [judged(window, 1.0) for _ in range(6)]
    assert sizes == [5, 6, 7, 8, 8, 8] and MAX_WINDOW == 8


def test_it_does_not_widen_without_room_and_goes_back_when_room_is_gone() -> None:
    window = PrefetchWindow(4)
    assert judged(window, 1.0, has_room=False) == 4
    assert [judged(window, 1.0), judged(window, 1.0)] == [5, 6]
    assert window.update(has_room=False) == 4


def test_it_narrows_when_they_are_not_used_but_never_to_nothing() -> None:
    window = PrefetchWindow(4)
    assert [judged(window, 0.2) for _ in range(4)] == [2, 1, 1, 1]


def test_it_recovers_from_a_bad_time() -> None:
    window = PrefetchWindow(4)
    judged(window, 0.0)
    assert [judged(window, 1.0) for _ in range(3)] == [3, 4, 5]


@pytest.mark.parametrize("share", [0.5, 0.75])
def test_in_between_it_stays(share: float) -> None:
    assert judged(PrefetchWindow(4), share) == 4


def test_too_few_outcomes_are_not_judged() -> None:
    window = PrefetchWindow(4)
    window.note(wasted=JUDGED_AFTER - 1)
    assert window.update(has_room=True) == 4
