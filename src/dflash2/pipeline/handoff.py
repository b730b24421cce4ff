"""Token ids from the tokenizer to engine and memory manager: written once, read by reference (R-1.3)."""

from __future__ import annotations

import asyncio
import threading
import weakref
from bisect import bisect_left
from collections import deque
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from dflash2.errors import DeadlineExceeded, IntegrityError, RequestTooLarge
from dflash2.types import IntArray


class TokenIds(Protocol):
    """What a tokenizer gives: its length is cheap, the list is not."""

    @property
    def ids(self) -> list[int]: ...

    def __len__(self) -> int: ...


@dataclass(frozen=True, slots=True)
class TokenRef:
    """A place in the ring: what is passed on instead of the ids.

    Attributes:
        offset: of the first id.
        length: ids that fit.
        generation: of the allocation; a reference that outlived its place is noticed.
    """

    offset: int
    length: int
    generation: int


class TokenRing:
    """One array of int32 for the ids of all requests, page-locked where a device can make use of that.

    Places are given out one after the other and around; those still held are stepped over. It never grows: a prompt
    that finds no room waits, which holds up the tokenizer and in the end the clients. Any thread may take and release.

    Args:
        num_tokens: size.
        page_locked: the device can copy from it directly.
    """

    def __init__(self, num_tokens: int, *, page_locked: bool = False) -> None:
        self._storage, self._ids = _allocate(num_tokens, page_locked)
        self._lock = threading.Lock()
        self._held: list[TokenRef] = []
        """By offset."""
        self._dropped: deque[TokenRef] = deque()
        """Places whose spans were collected as garbage, until somebody holds the lock anyway."""
        self._next = 0
        self._generation = 0
        self._line = asyncio.Lock()
        """First come first served: a small request does not take the room that a large one waits for."""
        self._waiter: tuple[asyncio.AbstractEventLoop, asyncio.Future[None]] | None = None
        self.num_waits = 0
        """How often somebody had to wait for room."""
        self.num_timeouts = 0
        """Of these, how often nobody made room in time."""
        self.num_written = 0
        """Ids written by ``put``: each exactly once."""

    @property
    def num_tokens(self) -> int:
        return len(self._ids)

    @property
    def num_held(self) -> int:
        """Ids whose place is taken."""
        with self._lock:
            self._take_back_dropped()
            return sum(ref.length for ref in self._held)

    @property
    def num_spans(self) -> int:
        with self._lock:
            self._take_back_dropped()
            return len(self._held)

    def view(self, ref: TokenRef) -> IntArray:
        """int32 ``[length]``, the memory itself.

        Raises:
            IntegrityError: the place was given back.
        """
        with self._lock:
            if self._index_of(ref) is None:
                raise IntegrityError(f"{ref} was released")
        return self._ids[ref.offset : ref.offset + ref.length]

    def try_take(self, length: int) -> TokenRef | None:
        """A place for ``length`` ids, or None if there is none now.

        Raises:
            RequestTooLarge: there never will be.
        """
        if length > self.num_tokens:
            raise RequestTooLarge(
                f"the request has {length} tokens and the ring between tokenizer and engine holds {self.num_tokens}; "
                "shorten it, or raise pipeline.ring_tokens"
            )
        with self._lock:
            self._take_back_dropped()
            offset = self._find(length)
            if offset is None:
                return None
            self._generation += 1
            ref = TokenRef(offset, length, self._generation)
            self._held.insert(bisect_left(self._held, offset, key=_offset), ref)
            self._next = offset + length
            return ref

    async def put(self, tokens: TokenIds, num_more: int, timeout_s: float) -> TokenSpan:
        """Write the ids of a prompt; waits for room. From one event loop only.

        Behind it there is room for ``num_more`` ids if that can be had without waiting, and none otherwise: then the
        answer stands elsewhere. Most answers are much shorter than they may become, so nobody waits for their sake.

        Raises:
            RequestTooLarge: there never will be room for the prompt.
            DeadlineExceeded: there was none within ``timeout_s``.
        """
        count = len(tokens)
        try:
            span = await asyncio.wait_for(self._take(count, num_more), timeout_s)
        except asyncio.TimeoutError:
            self.num_timeouts += 1
            raise DeadlineExceeded(
                f"the server was too busy to take in a prompt of {count} tokens within {timeout_s:.0f} s: others hold "
                f"{self.num_held} of the {self.num_tokens} tokens of pipeline.ring_tokens"
            ) from None
        span.buffer[:count] = tokens.ids
        self.num_written += count
        return span

    def release(self, ref: TokenRef) -> None:
        """Give a place back.

        Raises:
            IntegrityError: it was given back before.
        """
        with self._lock:
            self._remove(ref)
        self._wake_waiter()

    def drop(self, ref: TokenRef) -> None:
        """Give the place of a collected span back.

        The collector may run in the middle of any method of this class, in the same thread: nothing here takes a lock.
        """
        self._dropped.append(ref)
        self._wake_waiter()

    def stats(self) -> dict[str, Any]:
        return {
            "capacity_tokens": self.num_tokens,
            "held_tokens": self.num_held,
            "held_requests": self.num_spans,
            "written_tokens": self.num_written,
            "waits": self.num_waits,
            "timeouts": self.num_timeouts,
        }

    def check_integrity(self) -> None:
        """Raise IntegrityError if two places overlap or leave the ring."""
        with self._lock:
            self._take_back_dropped()
            end = 0
            for ref in self._held:
                if ref.offset < end:
                    raise IntegrityError(f"{ref} overlaps the one before it")
                end = ref.offset + ref.length
            if end > self.num_tokens:
                raise IntegrityError("a place lies outside the ring")

    async def _take(self, count: int, num_more: int) -> TokenSpan:
        """A place for a prompt. If its deadline comes in the same moment, the span gives itself back."""
        async with self._line:
            ref = self._try_take_prompt(count, num_more)
            while ref is None:
                self.num_waits += 1
                loop = asyncio.get_running_loop()
                room: asyncio.Future[None] = loop.create_future()
                with self._lock:
                    self._waiter = (loop, room)
                ref = self._try_take_prompt(count, num_more)  # again, so that no release in between goes unnoticed
                if ref is None:
                    await room
            self._waiter = None
            return TokenSpan(self, ref, count)

    def _try_take_prompt(self, count: int, num_more: int) -> TokenRef | None:
        if count + num_more <= self.num_tokens:
            whole = self.try_take(count + num_more)
            if whole is not None:
                return whole
        return self.try_take(count)

    def _take_back_dropped(self) -> None:
        """With the lock held."""
        while self._dropped:
            self._remove(self._dropped.popleft())

    def _remove(self, ref: TokenRef) -> None:
        index = self._index_of(ref)
        if index is None:
            raise IntegrityError(f"{ref} was released before")
        del self._held[index]

    def _wake_waiter(self) -> None:
        waiter = self._waiter
        if waiter is not None and not waiter[0].is_closed():
            waiter[0].call_soon_threadsafe(_wake, waiter[1])

    def _find(self, length: int) -> int | None:
        """Where ``length`` ids fit: from where the last place ended, around, until a gap is wide enough."""
        behind = bisect_left(self._held, self._next, key=_offset)
        found = self._first_gap(self._next, behind, length)
        return self._first_gap(0, 0, length) if found is None else found

    def _first_gap(self, offset: int, first: int, length: int) -> int | None:
        """The first gap from ``offset`` on; ``first`` is the index of the next place held."""
        for ref in self._held[first:]:
            if ref.offset - offset >= length:
                return offset
            offset = ref.offset + ref.length
        return offset if self.num_tokens - offset >= length else None

    def _index_of(self, ref: TokenRef) -> int | None:
        index = bisect_left(self._held, ref.offset, key=_offset)
        return index if index < len(self._held) and self._held[index] == ref else None


class TokenSpan:
    """One request's place in the ring, with its prompt in it.

    The engine releases it when the request has ended. A request that vanishes between two stages, because its client
    left, gives it back when nothing refers to the span any more.

    Args:
        ring: where it is.
        ref: its place.
        num_prompt_tokens: ids that are the prompt; the rest, if any, is for the answer.
    """

    __slots__ = ("__weakref__", "_if_dropped", "_lent", "_ring", "buffer", "num_prompt_tokens", "ref")

    def __init__(self, ring: TokenRing, ref: TokenRef, num_prompt_tokens: int) -> None:
        self._ring = ring
        self._if_dropped = weakref.finalize(self, ring.drop, ref)
        self._if_dropped.atexit = False
        self._lent = False
        self.ref = ref
        self.num_prompt_tokens = num_prompt_tokens
        self.buffer = ring.view(ref)
        """int32 ``[ref.length]``, the memory itself; not to be touched after ``release``."""

    @property
    def prompt(self) -> IntArray:
        """int32 ``[num_prompt_tokens]``, a view."""
        return self.buffer[: self.num_prompt_tokens]

    def try_lend(self) -> IntArray | None:
        """The whole place, to write the answer behind the prompt; None if somebody does that already.

        There may be no room for an answer, see ``TokenRing.put``.
        """
        if self._lent:
            return None
        self._lent = True
        return self.buffer

    def release(self) -> None:
        """Give the place back; once, when nobody reads it any more.

        Raises:
            IntegrityError: it was given back before.
        """
        if self._if_dropped.detach() is None:
            raise IntegrityError(f"{self.ref} was released before")
        self._ring.release(self.ref)


def _allocate(num_tokens: int, page_locked: bool) -> tuple[Any, IntArray]:
    """The array, and what owns its memory."""
    if not page_locked:
        ids = np.zeros(num_tokens, np.int32)
        return ids, ids
    import torch

    tensor = torch.zeros(num_tokens, dtype=torch.int32, pin_memory=True)
    return tensor, tensor.numpy()


def _offset(ref: TokenRef) -> int:
    return ref.offset


def _wake(room: asyncio.Future[None]) -> None:
    if not room.done():
        room.set_result(None)
