"""Order of SGLang's queue."""

from __future__ import annotations

from dflash2.integrations.sglang.queue_order import QueueOrder


def queue_of(order: QueueOrder, *arrivals: tuple[str, int]) -> list[str]:
    queue: list[str] = []
    for rid, size in arrivals:
        queue.insert(order.join(queue, rid, size), rid)
    return queue


def test_a_turn_with_little_to_compute_goes_ahead_of_long_prompts() -> None:
    assert queue_of(QueueOrder(), ("a", 1000), ("b", 1000), ("turn", 40)) == ["turn", "a", "b"]


def test_equals_keep_the_order_of_arrival() -> None:
    assert queue_of(QueueOrder(), ("a", 40), ("b", 50), ("c", 33)) == ["a", "b", "c"]


def test_a_long_prompt_lets_pass_no_more_tokens_than_it_has_itself() -> None:
    turns = [(f"turn{index}", 400) for index in range(4)]
    assert queue_of(QueueOrder(), ("long", 1000), *turns) == ["turn0", "turn1", "long", "turn2", "turn3"]


def test_what_was_let_pass_is_remembered_until_a_request_leaves() -> None:
    order = QueueOrder()
    queue = queue_of(order, ("long", 1100), ("one", 600))
    assert queue == ["one", "long"]
    order.leave("one")
    assert order.join(["long"], "two", 600) == 1
    order.leave("long")
    assert order.join(["long"], "three", 1) == 1  # nothing is known of it any more: nobody passes it
