"""Questions to the thread that owns the runtime."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import CancelledError

import pytest

from dflash2.monitoring.mailbox import Mailbox


def test_a_question_is_answered_by_the_owner_and_in_order() -> None:
    box: Mailbox[list[str]] = Mailbox()
    first, second = box.put(lambda owner: owner.append("a")), box.put(lambda owner: owner.append("b") or "done")
    assert not first.done()
    owner: list[str] = []
    box.answer(owner)
    assert owner == ["a", "b"] and second.result() == "done"
    box.answer(owner)
    assert owner == ["a", "b"]


def test_what_it_raises_reaches_who_asked_and_nobody_else() -> None:
    box: Mailbox[dict[str, int]] = Mailbox()
    wrong, right = box.put(lambda owner: owner["absent"]), box.put(len)
    box.answer({})
    with pytest.raises(KeyError, match="absent"):
        wrong.result()
    assert right.result() == 0


def test_a_question_that_was_withdrawn_is_not_asked() -> None:
    box: Mailbox[list[str]] = Mailbox()
    owner: list[str] = []
    question = box.put(lambda owner: owner.append("a"))
    question.cancel()
    box.answer(owner)
    assert owner == []
    with pytest.raises(CancelledError):
        question.result()


def test_an_owner_that_never_comes_by_does_not_make_it_grow() -> None:
    box: Mailbox[None] = Mailbox()
    for _ in range(100):
        box.put(lambda owner: None).cancel()
    assert len(box._questions) == 1


def test_asking_from_a_loop_while_another_thread_owns() -> None:
    box: Mailbox[str] = Mailbox()
    stopping = threading.Event()

    def own() -> None:
        while not stopping.wait(0.001):
            box.answer("owner")

    thread = threading.Thread(target=own)
    thread.start()

    async def ask() -> list[str]:
        return await asyncio.gather(*(box.ask(lambda owner, n=n: f"{owner} {n}") for n in range(20)))

    try:
        assert asyncio.run(ask()) == [f"owner {n}" for n in range(20)]
    finally:
        stopping.set()
        thread.join()
