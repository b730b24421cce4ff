"""Case T19, and what the ledger promises."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflash2.cache.reservation import ReservationLedger
from dflash2.errors import IntegrityError, RequestTooLarge


def test_a_promise_is_released_once_and_the_room_goes_to_another() -> None:
    ledger = ReservationLedger(150, largest=120)
    assert ledger.try_reserve("P", 100)
    assert not ledger.try_reserve("Q", 100)
    assert not ledger.holds("Q") and ledger.num_promised == 100
    ledger.release("P")
    with pytest.raises(KeyError):
        ledger.release("P")
    assert ledger.num_promised == 0
    assert ledger.try_reserve("Q", 100)
    ledger.check_integrity()


def test_too_large_is_refused_however_empty_it_is() -> None:
    ledger = ReservationLedger(100, largest=20)
    with pytest.raises(RequestTooLarge, match="needs 21 KV blocks at once and this server has room for 20"):
        ledger.try_reserve("P", 21)
    assert ledger.num_requests == 0
    assert ReservationLedger(10, largest=20).largest == 10


def test_one_request_has_one_promise() -> None:
    ledger = ReservationLedger(100, largest=20)
    ledger.try_reserve("P", 1)
    with pytest.raises(IntegrityError):
        ledger.try_reserve("P", 1)


def test_tiers_that_shrink_keep_their_promises_and_make_no_new_ones() -> None:
    ledger = ReservationLedger(100, largest=60)
    ledger.try_reserve("P", 60)
    ledger.shrink(50)
    assert not ledger.try_reserve("Q", 1)
    ledger.release("P")
    assert ledger.try_reserve("Q", 50)


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 8))))
def test_promises_never_exceed_the_whole(calls: list[tuple[int, int]]) -> None:
    ledger, held = ReservationLedger(20, largest=8), {}
    for name, count in calls:
        request = str(name)
        if ledger.holds(request):
            ledger.release(request)
            del held[request]
        elif ledger.try_reserve(request, count):
            held[request] = count
        else:
            assert sum(held.values()) + count > 20
        assert ledger.num_promised == sum(held.values()) <= 20
        assert ledger.num_requests == len(held)
        ledger.check_integrity()
