"""Are the answers the same? Where they part, was it a tie?"""

from __future__ import annotations

from dataclasses import dataclass

from dflash2.demo.play import Transcript

TIE = 1e-3
"""Two logits nearer than this are a tie: float32 sums in another order may turn it."""
TIES_PER_TOKENS = 10_000
"""At most one tie in so many tokens is accepted."""


@dataclass(frozen=True, slots=True)
class Divergence:
    """The first token at which two settings differ in one answer."""

    chat: int
    turn: int
    position: int
    gap: float
    """Distance of the two best logits there, the larger of the two settings."""


def first_divergences(reference: Transcript, other: Transcript) -> list[Divergence]:
    """One entry a chat that parts; what follows the first difference cannot be compared."""
    found = []
    parted: set[int] = set()
    for (chat, turn), answer in sorted(reference.answers.items()):
        if chat in parted:
            continue
        theirs = other.answers[chat, turn]
        for position, (mine, their) in enumerate(zip(answer, theirs, strict=True)):
            if mine != their:
                gap = max(reference.gaps[chat, turn][position], other.gaps[chat, turn][position])
                found.append(Divergence(chat, turn, position, gap))
                parted.add(chat)
                break
    return found


def acceptable(divergences: list[Divergence], num_tokens: int) -> bool:
    """Only ties, and no more than one in ``TIES_PER_TOKENS`` tokens."""
    return all(each.gap <= TIE for each in divergences) and len(divergences) * TIES_PER_TOKENS <= num_tokens
