"""Case T19, and what the ledger promises."""

from __future__ import annotations

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from dflash2.cache.reservation import ReservationLedger
from dflash2.errors import IntegrityError, RequestTooLarge


def test_a_promise_is_released_once_and_the_room_goes_to_another() -> None:
    ledger = ReservationLedger(150, largest=120)
    assert ledger.try_reserve("P", 100)
    assert not ledger.try_reserve("Q", 100)
    assert not ledger.holds("Q") and ledger.num_promised == 100
    ledger.release("P")
    with pytest.raises(IntegrityError, match="has no reservation"):
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


def test_a_promise_grows_all_or_nothing_and_shrinks() -> None:
    ledger = ReservationLedger(30, largest=25)
    ledger.try_reserve("P", 10)
    ledger.try_reserve("Q", 10)
    assert not ledger.try_extend("P", 21)
    assert ledger.promised_to("P") == 10
    assert ledger.try_extend("P", 20) and ledger.num_free == 0
    assert ledger.try_extend("P", 5) and ledger.promised_to("P") == 20  # it never shrinks by extending
    assert ledger.give_back("P", 12) == 8
    assert ledger.give_back("P", 15) == 0
    assert ledger.num_free == 8
    with pytest.raises(RequestTooLarge):
        ledger.try_extend("P", 26)
    for call in (ledger.try_extend, ledger.give_back):
        with pytest.raises(IntegrityError):
            call("nobody", 1)


class LedgerMachine(RuleBasedStateMachine):
    """Requests come, are extended, give back, and end in every way there is: the account always adds up."""

    LARGEST = 8

    def __init__(self) -> None:
        super().__init__()
        self.ledger = ReservationLedger(20, self.LARGEST)
        self.held: dict[str, int] = {}
        self.num_names = 0

    @rule(count=st.integers(0, LARGEST + 2))
    def reserve(self, count: int) -> None:
        name = f"r{self.num_names}"
        self.num_names += 1
        free = self.ledger.num_free
        if count > self.LARGEST:
            with pytest.raises(RequestTooLarge):
                self.ledger.try_reserve(name, count)
            return
        given = self.ledger.try_reserve(name, count)
        assert given == (count <= free)
        if given:
            self.held[name] = count

    @precondition(lambda self: self.held)
    @rule(data=st.data(), count=st.integers(0, LARGEST))
    def extend(self, data: st.DataObject, count: int) -> None:
        name = data.draw(st.sampled_from(sorted(self.held)))
        free = self.ledger.num_free
        given = self.ledger.try_extend(name, count)
        assert given == (count - self.held[name] <= free)
        if given:
            self.held[name] = max(self.held[name], count)

    @precondition(lambda self: self.held)
    @rule(data=st.data(), count=st.integers(0, LARGEST))
    def give_back(self, data: st.DataObject, count: int) -> None:
        name = data.draw(st.sampled_from(sorted(self.held)))
        assert self.ledger.give_back(name, count) == max(0, self.held[name] - count)
        self.held[name] = min(self.held[name], count)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        """Finish, cancel, crash and timeout are one to the ledger; a second release is an error and changes nothing."""
        name = data.draw(st.sampled_from(sorted(self.held)))
        self.ledger.release(name)
        del self.held[name]
        with pytest.raises(IntegrityError):
            self.ledger.release(name)

    @rule(num_blocks=st.integers(0, 30))
    def resize(self, num_blocks: int) -> None:
        self.ledger.shrink(num_blocks)

    @invariant()
    def adds_up(self) -> None:
        self.ledger.check_integrity()
        assert self.ledger.num_promised == sum(self.held.values())
        assert self.ledger.num_requests == len(self.held)
        assert self.ledger.num_free == max(0, self.ledger.num_blocks - sum(self.held.values()))


TestLedgerMachine = LedgerMachine.TestCase


def test_branches_together_fit_all_tiers_and_each_fits_hbm() -> None:
    ledger = ReservationLedger(100, largest=20)
    assert ledger.try_reserve("P", 60, at_once=20)
    assert ledger.try_extend("P", 70, at_once=20)
    assert not ledger.try_reserve("Q", 31, at_once=20) and ledger.num_promised == 70
    with pytest.raises(RequestTooLarge, match="needs 101 KV blocks for all its branches"):
        ledger.check_size(101, at_once=20)
    with pytest.raises(RequestTooLarge, match="needs 21 KV blocks at once"):
        ledger.check_size(50, at_once=21)
    for call in (ledger.try_reserve, ledger.try_extend):
        with pytest.raises(RequestTooLarge, match="needs 101 KV blocks for all its branches"):
            call("P" if call == ledger.try_extend else "R", 101, 20)
    assert ledger.num_promised == 70 and not ledger.holds("R")
