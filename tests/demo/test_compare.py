"""Where two transcripts part, and whether that is accepted."""

from __future__ import annotations

from dflash2.demo.compare import Divergence, acceptable, first_divergences
from dflash2.demo.play import Transcript


def transcript(answers: dict[tuple[int, int], list[int]], gap: float = 1.0) -> Transcript:
    return Transcript(answers=answers, gaps={key: [gap] * len(tokens) for key, tokens in answers.items()})


def test_equal_answers_have_no_divergence() -> None:
    one = transcript({(0, 0): [1, 2, 3], (0, 1): [4]})
    assert first_divergences(one, transcript({(0, 0): [1, 2, 3], (0, 1): [4]})) == []


def test_only_the_first_difference_of_a_chat_counts() -> None:
    one = transcript({(0, 0): [1, 2, 3], (0, 1): [4], (1, 0): [5, 6]}, gap=0.5)
    other = transcript({(0, 0): [1, 9, 9], (0, 1): [8], (1, 0): [5, 7]}, gap=0.25)
    assert first_divergences(one, other) == [Divergence(0, 0, 1, 0.5), Divergence(1, 0, 1, 0.5)]


def test_a_tie_is_accepted_once_in_ten_thousand_tokens() -> None:
    tie = Divergence(0, 0, 1, 1e-3)
    assert acceptable([], 1)
    assert acceptable([tie], 10_000)
    assert not acceptable([tie], 9_999)
    assert not acceptable([tie, tie], 19_999)


def test_a_clear_difference_is_not_accepted() -> None:
    assert not acceptable([Divergence(0, 0, 1, 1.1e-3)], 1_000_000)
