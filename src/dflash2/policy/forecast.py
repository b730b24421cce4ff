"""When each session comes back: follows requests, learns from every return, keeps the outlook of all sessions."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from dflash2.policy.base import Outcome, RequestTraits
from dflash2.policy.features import (
    MOST_TURNS,
    TOOL_STOPS,
    RequestFigures,
    at_arrival,
    at_end,
    history_classes,
    kind_of,
    size_class,
)
from dflash2.policy.gaps import LOW_PLAIN, GapModel, Wait
from dflash2.policy.hazard import NUM_BINS, assumed_hazard
from dflash2.policy.outlook import Outlook
from dflash2.policy.sessions import MAX_SESSIONS, History, Session, SessionIndex
from dflash2.policy.touches import TouchModel

RUN_PLAIN, RUN_SCALED, IDLE_PLAIN, IDLE_SCALED = range(4)
"""Models. The last is that of the first stop reason; those of others follow it."""
MAX_STOPS = 4
"""Stop reasons told apart; those seen later count as the last one."""
LEARN_AT_GROWTH = 0.05
"""A model learns anew when a twentieth of the waits it knows are new to it,"""
LEARN_AT_LEAST = 10
"""though never at fewer than so many new ones,"""
LEARN_AT_MOST = 250
"""and always at so many."""
ASSUMED_LOG_GAP = 3.0
"""Before any was seen: twenty seconds."""
LAPSE = 0.999
"""Weight of the past in the usual gap, per new one."""
SHARED_HAZARD = 0.03
"""Assumed of such blocks, in each bin."""
NUM_SHARED_CLASSES = 7
"""Of blocks that no single session decides about: six by how many share them, and those of nobody known."""


@dataclass(slots=True, eq=False)
class Request:
    """A request that has not ended.

    Attributes:
        session: it is a turn of.
        figures: sizes.
        turn: number of the turn.
        num_keys: blocks of the prompt.
        num_common: leading blocks that the session's last request had too.
        partial_tail: the last of them is not full.
        num_seen: blocks it has used so far.
        previous: segments of the session's last request, until it is known which of their blocks are used again.
        segments: of this request, by (class, level).
    """

    session: Session
    figures: RequestFigures
    turn: int
    num_keys: int
    num_common: int
    partial_tail: bool
    previous: list[int] | None
    num_seen: int = 0
    segments: dict[tuple[int, int], int] = field(default_factory=dict)


class UsualGap:
    """Average log gap of all sessions, the past fading slowly."""

    def __init__(self) -> None:
        self.total, self.weight = ASSUMED_LOG_GAP, 1.0

    @property
    def log_s(self) -> float:
        return self.total / self.weight

    def note(self, log_gap: float) -> None:
        self.total = self.total * LAPSE + log_gap
        self.weight = self.weight * LAPSE + 1.0


class Forecaster:
    """Sessions and the models of their waits."""

    def __init__(self) -> None:
        self.sessions = SessionIndex()
        self.models = [GapModel(scaled, 4 if scaled else 1) for scaled in (False, True, False, *[True] * MAX_STOPS)]
        self.touches = TouchModel(NUM_SHARED_CLASSES, np.full(NUM_BINS, SHARED_HAZARD))
        self.turns = TouchModel(1, assumed_hazard(LOW_PLAIN, 0.98, 10.0, 1.5))
        """Blocks of paused requests: their turn comes, it is only not known when."""
        self.outlook = Outlook(self.models, MAX_SESSIONS + 1, self.touches.low)
        self.show_touches()
        self._usual = UsualGap()
        self._usual_by_stop = {stop: UsualGap() for stop in range(1, MAX_STOPS + 1)}
        self._stops: dict[str, int] = {}
        self._tool_stops: set[int] = set()
        self._learned_at = [0] * len(self.models)
        """Waits begun when each model learned last."""
        self._to_learn: list[int] = []
        self._num_begun = 0
        """Waits begun since somebody looked whether it is time to learn."""

    def arrive(self, traits: RequestTraits, keys: Sequence[Hashable], now: float) -> tuple[Request, Session | None]:
        """A request has arrived.

        Returns:
            The request, and the session that was forgotten to remember this one's.
        """
        session, num_common, forgotten = self.sessions.find(keys, traits.session)
        if forgotten is not None:
            self._end_waits(forgotten, now, came_back=False)
        if session.turns:
            self._note_return(session, now)
        session.turns += 1
        session.arrived_s, session.finished_s = now, None
        per_block = -(-traits.num_prompt_tokens // max(1, len(keys)))
        num_new = max(1, traits.num_prompt_tokens - num_common * per_block)
        figures = RequestFigures(kind_of(traits), traits.num_prompt_tokens, num_new, traits.beam_width)
        request = Request(session, figures, session.turns, len(keys), num_common, traits.partial_tail, session.segments)
        session.segments = []
        self._begin_running(request, now)
        return request, forgotten

    def finish(self, request: Request, outcome: Outcome | None, now: float) -> None:
        """A request has ended; only the session's last one tells how long it will be idle."""
        session = request.session
        if session.turns != request.turn or session.running is None:
            return
        session.finished_s = now
        stop = self._stop_number(None if outcome is None else outcome.stop_reason)
        session.last_stop = stop
        history = session.by_stop.setdefault(stop, History()) if stop else session.idle
        usual = self._usual_by_stop[stop].log_s if stop else self._usual.log_s
        num_output = 0 if outcome is None else outcome.num_output_tokens
        features = at_end(request.figures, session, num_output, history, usual, by_stop=stop > 0)
        number = IDLE_SCALED + stop - 1 if stop else IDLE_PLAIN
        session.waiting = self._begin(number, features, request, history, num_output, now)

    def show_touches(self) -> None:
        """The models of blocks have learned."""
        self.outlook.replace_touch(self.touches.tables, self.turns.tables)

    def is_time_to_learn(self, ahead: float) -> bool:
        """There is work for ``learn``: some model has a part ``ahead`` of the new waits that it learns anew at."""
        if not self._to_learn and self._num_begun >= ahead * LEARN_AT_LEAST:
            self._num_begun = 0
            self._to_learn = [number for number in range(len(self.models)) if self._is_due(number, ahead)]
        return bool(self._to_learn)

    def learn(self, now: float) -> None:
        """One slice of a round: one model. A few milliseconds."""
        number = self._to_learn.pop()
        model = self.models[number]
        self._learned_at[number] = model.num_begun
        owners, by_history, by_size, log_scales = model.refit(now)
        self.outlook.replace(number, owners, by_history, by_size, log_scales)

    def state(self, now: float) -> dict[str, Any]:
        """What was learned of waits, JSON-able; sessions are not in it."""
        return {
            "models": [model.state(now) for model in self.models],
            "touches": self.touches.state(),
            "turns": self.turns.state(),
            "stops": list(self._stops),
            "usual": [[gap.total, gap.weight] for gap in (self._usual, *self._usual_by_stop.values())],
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Take over what ``state`` returned.

        Raises:
            KeyError, TypeError, ValueError: it is of another shape.
        """
        for model, rows in zip(self.models, state["models"], strict=True):
            model.restore(rows)
        self.touches.restore(state["touches"])
        self.turns.restore(state["turns"])
        for reason in state["stops"]:
            self._stop_number(str(reason))
        for gap, (total, weight) in zip((self._usual, *self._usual_by_stop.values()), state["usual"], strict=True):
            gap.total, gap.weight = float(total), float(weight)
        self._to_learn = [number for number, model in enumerate(self.models) if model.num_begun]
        while self._to_learn:
            self.learn(0.0)

    # -- inside --------------------------------------------------------------------------------------------------

    def _is_due(self, number: int, ahead: float) -> bool:
        num_begun = self.models[number].num_begun
        num_new = num_begun - self._learned_at[number]
        return num_new >= ahead * min(LEARN_AT_MOST, max(LEARN_AT_LEAST, LEARN_AT_GROWTH * num_begun))

    def _begin_running(self, request: Request, now: float) -> None:
        session = request.session
        number = RUN_SCALED if request.figures.kind else RUN_PLAIN
        after_tool = session.last_stop in self._tool_stops
        features = at_arrival(request.figures, session, self._usual.log_s, after_tool)
        session.running = self._begin(number, features, request, session.paced, 0, now)

    def _begin(
        self, number: int, features: list[float], request: Request, history: History, num_output: int, now: float
    ) -> tuple[GapModel, Wait]:
        session, model = request.session, self.models[number]
        turn_class = min(session.turns, MOST_TURNS)
        by_history = (request.figures.kind, *history_classes(history), turn_class) if model.scaled else (turn_class,)
        classes = (*by_history, size_class(num_output, 2.0), *request.figures.classes)
        wait = model.begin(features, classes, session.row, now)
        self._num_begun += 1
        self.outlook.set_session(session.row, number, wait.by_history, wait.by_size, wait.log_scale, now)
        return model, wait

    def _note_return(self, session: Session, now: float) -> None:
        """The session has come back: its waits end, and its history grows."""
        self._end_waits(session, now, came_back=True)
        session.paced.note(now - session.arrived_s)
        gap_s = 0.0 if session.finished_s is None else now - session.finished_s
        session.idle.note(gap_s)
        self._usual.note(session.idle.last)
        if session.finished_s is not None and session.last_stop:
            session.by_stop[session.last_stop].note(gap_s)
            self._usual_by_stop[session.last_stop].note(session.idle.last)

    def _end_waits(self, session: Session, now: float, *, came_back: bool) -> None:
        for going_on in (session.running, session.waiting):
            if going_on is not None:
                model, wait = going_on
                model.end(wait, now, came_back=came_back)
        session.running = session.waiting = None

    def _stop_number(self, reason: str | None) -> int:
        if reason is None:
            return 0
        if reason not in self._stops and len(self._stops) < MAX_STOPS:
            self._stops[reason] = len(self._stops) + 1
        number = self._stops.get(reason, MAX_STOPS)
        if reason in TOOL_STOPS:
            self._tool_stops.add(number)
        return number
