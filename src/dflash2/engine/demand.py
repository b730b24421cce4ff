"""What requests hold of HBM and what their turns need, in blocks."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np

from dflash2.cache.admission import Admission
from dflash2.cache.waiting import short_beside
from dflash2.engine.request_state import RequestState
from dflash2.runtime import Runtime
from dflash2.types import IntArray


class Demand:
    """Counts it, and tells admission once a step.

    Args:
        runtime: memory of this rank.
        admission: told.
        quantum_tokens: length of a turn after the prompt.
    """

    def __init__(self, runtime: Runtime, admission: Admission, quantum_tokens: int) -> None:
        self._runtime = runtime
        self._admission = admission
        self._quantum_tokens = quantum_tokens
        self._shared_ids: IntArray = np.empty(0, np.int32)
        """Blocks of those in HBM or taking turns there, as of this step."""

    def turn_tokens(self, state: RequestState) -> int:
        """Tokens whose KV an admitted request's next turn computes."""
        wanted = state.num_tokens + self._quantum_tokens
        return min(wanted, state.max_total_tokens) - state.blocks.num_tokens

    def growth_blocks(self, state: RequestState) -> int:
        """Blocks that an admitted request's turn adds to those it has."""
        blocks = self._runtime.layout.num_blocks(state.blocks.num_tokens + self.turn_tokens(state))
        return max(0, blocks - len(state.blocks.block_ids))

    def unshared_blocks(self, state: RequestState) -> int:
        """Blocks that a paused request needs for its turn and nobody in HBM or taking turns there has."""
        new = int(np.count_nonzero(~np.isin(state.blocks.block_ids, self._shared_ids)))
        return new + self.growth_blocks(state)

    def note(
        self,
        resident: Collection[RequestState],
        paused: Collection[RequestState],
        waiting: Collection[RequestState],
        *,
        short_first: bool,
    ) -> None:
        """Tell admission what those in HBM or taking turns there have, and what all others want.

        Also says which paused requests are small. When pressure ends, what smoothing let in is forgotten: a
        later burst begins anew.
        """
        growth = {state: self.growth_blocks(state) for state in (*resident, *paused)}
        held = int(np.count_nonzero(self._runtime.cache.table.ref_count)) + sum(growth.values())
        sharing = [*resident, *(state for state in paused if state.takes_turns)]
        self._shared_ids = _distinct(sharing)
        in_use = len(self._shared_ids) + sum(growth[state] for state in sharing)
        small = sum(len(state.blocks.block_ids) + growth[state] for state in resident if state.is_small)
        self._admission.tick(in_use, held - in_use + sum(map(self._first_turn_blocks, waiting)), small)
        if not self._admission.under_pressure:
            for state in (*resident, *paused):
                state.takes_turns = state.is_small = False
        elif short_first:
            short_tokens = short_beside(state.size_tokens for state in (*resident, *paused, *waiting))
            for state in paused:
                blocks = self._runtime.layout.num_blocks(state.size_tokens)
                state.is_small = state.size_tokens <= short_tokens and self._admission.fits_lane(blocks)

    def _first_turn_blocks(self, state: RequestState) -> int:
        """Blocks of a waiting request at the end of its first turn."""
        tokens = min(state.num_tokens + self._quantum_tokens, state.max_total_tokens)
        return self._runtime.layout.num_blocks(tokens)


def _distinct(states: list[RequestState]) -> IntArray:
    """int32, the blocks of all of them, each once."""
    ids: IntArray = np.unique(np.concatenate([np.empty(0, np.int32), *(state.blocks.block_ids for state in states)]))
    return ids
