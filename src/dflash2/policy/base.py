"""What the cache manager asks of a placement policy, and what it tells it about requests."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from dflash2.table.page_table import PageTable
from dflash2.types import BoolArray, IntArray, Tier


@dataclass(frozen=True, slots=True)
class RequestTraits:
    """What is known of a request when it arrives.

    Attributes:
        session: the conversation it belongs to, as the client names it; None: to be told from its blocks.
        input_kinds: what the new part of the prompt consists of (``text``, ``tool_result``, …), where that is known.
        num_prompt_tokens: length of the prompt.
        partial_tail: the last key stands for a block that is not full. Only traces have such keys.
        beam_width: sequences that will be decoded side by side.
    """

    session: str | None = None
    input_kinds: tuple[str, ...] = ()
    num_prompt_tokens: int = 0
    partial_tail: bool = False
    beam_width: int = 1


@dataclass(frozen=True, slots=True)
class Outcome:
    """What is known of a request only when it has ended.

    Attributes:
        stop_reason: as the API reports it (``stop``, ``length``, ``tool_use``, …); None if there is none.
        num_output_tokens: tokens generated.
    """

    stop_reason: str | None
    num_output_tokens: int


class PlacementPolicy(Protocol):
    """Judges blocks; never moves them. A new policy is one file with this class in it and one line in ``build``.

    Times are seconds of the clock that the caller carries through a step, so all ranks judge alike. A request is named
    by the id that ``on_arrival`` gave; None stands for blocks that no known request uses.
    """

    name: str
    cold_threshold: float
    """The user's: blocks below this heat may be demoted ahead of need. May be changed while running."""
    effective_threshold: float
    """What ``is_cold`` goes by: the user's, or lower where the adaptive guard has moved it. Set at each refresh."""

    def horizon_s(self, now: float) -> float:
        """The time in which HBM turns over once."""
        ...

    def on_arrival(self, request_id: str, traits: RequestTraits, keys: Sequence[Hashable], now: float) -> None:
        """A request has arrived; told before it uses anything.

        Args:
            request_id: unique among the requests that have not ended.
            traits: what is known of it.
            keys: identity of the prompt's blocks in order, cached or not.
            now: seconds.
        """
        ...

    def on_use(self, table: PageTable, ids: IntArray, now: float, request_id: str | None) -> None:
        """A request that becomes resident uses these distinct blocks, in the order of its prompt."""
        ...

    def on_allocate(self, table: PageTable, ids: IntArray, now: float, request_id: str | None) -> None:
        """New blocks of a request took HBM slots, in order: the pace at which HBM turns over."""
        ...

    def on_finish(self, request_id: str, outcome: Outcome | None, now: float) -> None:
        """A request has ended; ``outcome`` is None where the engine does not say how. Unknown ids are ignored."""
        ...

    def refresh(self, table: PageTable, now: float) -> None:
        """Write ``table.heat`` in [0, 1] for all rows in use. Never on the path of a step."""
        ...

    def is_cold(self, table: PageTable, ids: IntArray, now: float) -> BoolArray:
        """bool ``[n]``: may be demoted ahead of need."""
        ...

    def order(self, table: PageTable, ids: IntArray, count: int, now: float) -> IntArray:
        """The ``count`` least valuable of ``ids``, the least valuable first; a block never before its followers."""
        ...

    def worth_storing(self, table: PageTable, ids: IntArray, tier: Tier, now: float) -> BoolArray:
        """bool ``[n]``: likely enough to be read again for a copy on ``tier`` ahead of need."""
        ...

    def on_leave(self, table: PageTable, ids: IntArray, tier: Tier, now: float) -> BoolArray:
        """These blocks, which nobody holds, leave the last tier that has them for ``tier``.

        Returns:
            bool ``[n]``: better forgotten than written there.
        """
        ...

    def explain(self, table: PageTable, block_id: int, now: float) -> dict[str, Any]:
        """Why a block has its heat: names and figures for people, JSON-able."""
        ...

    def state(self) -> dict[str, Any]:
        """What was learned, JSON-able, to be given to ``restore`` after a restart."""
        ...

    def restore(self, state: dict[str, Any]) -> None:
        """Take over what ``state`` returned. A state of another policy or version is ignored."""
        ...
