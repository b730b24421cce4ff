"""What a request looks like to the models: 17 figures near 1, and a path of classes."""

from __future__ import annotations

import math

from dflash2.policy.base import RequestTraits
from dflash2.policy.sessions import History, Session

MIXED_KIND = 3
TOOL_KIND = 2
TEXT_KIND = 1
TOOL_STOPS = frozenset({"tool_use", "tool_calls", "function_call"})
MOST_TURNS = 6


def kind_of(traits: RequestTraits) -> int:
    """0 where nothing is known of the input, else one of the kinds above."""
    kinds = set(traits.input_kinds)
    if not kinds:
        return 0
    if kinds == {"text"}:
        return TEXT_KIND
    return TOOL_KIND if kinds == {"tool_result"} else MIXED_KIND


def log_class(value: float) -> int:
    """Class of a log gap: 0 below one second, then one for each factor of three."""
    return 0 if value < 0.0 else 1 + min(20, int(value / math.log(3.0)))


def history_classes(history: History) -> tuple[int, int]:
    """Classes of the average and of the last gap; 0 where there is none yet."""
    if not history.count:
        return 0, 0
    return 1 + log_class(history.slow), 1 + log_class(history.last)


def size_class(number: int, base: float) -> int:
    """Class of a number of tokens: 0 for none, then one for each factor of ``base``."""
    return 0 if number < 1 else 1 + int(math.log(number) / math.log(base))


class RequestFigures:
    """Sizes of a request, as logarithms about 0, and as classes.

    Args:
        kind: see ``kind_of``.
        num_prompt_tokens, num_new_tokens: all of the prompt, and what the session's last request did not have.
        beam_width: sequences decoded side by side.
    """

    __slots__ = ("beams", "classes", "kind", "new", "size")

    def __init__(self, kind: int, num_prompt_tokens: int, num_new_tokens: int, beam_width: int) -> None:
        self.kind = kind
        self.beams = math.log(max(1, beam_width))
        self.size = math.log(num_prompt_tokens + 1.0) / 10.0 - 1.0
        self.new = math.log(num_new_tokens + 1.0) / 7.0 - 1.0
        self.classes = (size_class(num_new_tokens, 3.0), size_class(num_prompt_tokens, 2.0))


def at_arrival(figures: RequestFigures, session: Session, usual: float, after_tool: bool) -> list[float]:
    """Features of the time until the session's next request, as known when this one arrives.

    Args:
        figures: of the request.
        session: its turn counted.
        usual: log gap where the session has no history.
        after_tool: its last request ended in a tool call.
    """
    fast, slow, last, known = _history(session.paced, usual)
    kind = figures.kind
    return [
        *(1.0, figures.new, figures.size, fast, slow, last),
        *(float(kind == TOOL_KIND), float(kind == TEXT_KIND), math.log(session.turns) - 0.7, known),
        *(float(kind == MIXED_KIND), float(after_tool), 4.0 * figures.size * figures.size),
        *(float(session.turns == 2), figures.new * figures.new, 0.0, figures.beams),
    ]


def at_end(
    figures: RequestFigures, session: Session, num_output_tokens: int, history: History, usual: float, by_stop: bool
) -> list[float]:
    """Features of the idle time that begins when a request ends.

    Args:
        figures: of the request.
        session: of the request.
        num_output_tokens: generated.
        history: of the session's idle times, of those after the same stop reason where it is known.
        usual: log gap where there is no history.
        by_stop: the stop reason is known.
    """
    fast, slow, last, known = _history(history, usual)
    out = math.log(num_output_tokens + 1.0) / 5.0 - 1.0
    kind = figures.kind
    special = (math.sqrt(history.variance) - 1.0) * known if by_stop else float(session.turns == 2)
    return [
        *(1.0, out, figures.size, figures.new, fast, slow, last),
        *(float(kind == TOOL_KIND), float(kind == TEXT_KIND), math.log(session.turns) - 0.7, known),
        *(float(kind == MIXED_KIND), out * out, 4.0 * figures.size * figures.size),
        *(special, out if session.turns == 1 else 0.0, figures.beams),
    ]


def _history(history: History, usual: float) -> tuple[float, float, float, float]:
    if not history.count:
        unknown = usual / 4.0 - 1.0
        return unknown, unknown, unknown, 0.0
    return history.fast / 4.0 - 1.0, history.slow / 4.0 - 1.0, history.last / 4.0 - 1.0, 1.0
