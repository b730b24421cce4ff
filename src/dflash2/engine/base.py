"""What a front end and a synchronous engine agree on: requests in, tokens out. No torch here.

An engine belongs to one thread: every method is called from the thread that calls ``step()``.
``AsyncEngine`` is that thread for servers; a script may drive an engine directly::

    engine.add(request)
    while engine.has_work:
        for output in engine.step():
            ...
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any, Protocol

from dflash2.pipeline.handoff import TokenSpan
from dflash2.types import IntArray

if TYPE_CHECKING:
    from dflash2.engine.sampling import SamplingParams


class FinishReason(Enum):
    """Why a request ended."""

    STOP = "stop"
    """An end-of-sequence or stop token was produced; it is the last ``token_id``. Or ``end_answer()`` was called."""
    LENGTH = "length"
    """``max_tokens`` or the context is used up."""
    CANCELLED = "cancelled"
    """``cancel()`` was called."""
    ERROR = "error"
    """The request failed; ``TokenOutput.error`` says how. Other requests are not affected."""
    TIMEOUT = "timeout"
    """The request was not admitted before its deadline; ``TokenOutput.error`` says what was short."""


@dataclass(frozen=True, slots=True)
class RequestHints:
    """What a client may say about a request besides what it wants; none of it changes the answer.

    Attributes:
        session_id: the conversation it belongs to.
        ttl_s: how long a pin lasts, from the end of the request on.
        priority: smaller goes first, as in vLLM; 0 is the usual.
        pin: keep the prompt's blocks for ``ttl_s``, whatever the policy thinks of them.
    """

    session_id: str | None = None
    ttl_s: float | None = None
    priority: int = 0
    pin: bool = False


@dataclass(frozen=True, slots=True)
class PrefetchReport:
    """Where the tokens of an announced prompt are, each on the fastest tier that has it."""

    num_prompt_tokens: int
    hbm_tokens: int
    dram_tokens: int
    nvme_tokens: int

    @property
    def missing_tokens(self) -> int:
        """Those that have to be computed."""
        return self.num_prompt_tokens - self.hbm_tokens - self.dram_tokens - self.nvme_tokens


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Natural logarithms of probabilities at one position.

    Attributes:
        logprob: of the token that was chosen.
        top_ids: the likeliest tokens, the likeliest first; as many as were asked for.
        top_logprobs: theirs.
    """

    logprob: float
    top_ids: tuple[int, ...]
    top_logprobs: tuple[float, ...]


@dataclass(frozen=True, slots=True, eq=False)
class GenerationRequest:
    """One prompt and how to continue it.

    Attributes:
        request_id: unique among the requests that the engine holds.
        token_ids: int32 ``[n]``, the prompt, n >= 1.
        sampling: limits, randomness and stop tokens. Stop strings are the front end's work.
        arrival_s: when the request arrived, before tokenising, on the engine's clock (``time.monotonic``).
        adapter: name of a LoRA adapter.
        tenant_salt: requests share cached blocks only with requests of the same salt.
        hints: what helps to place and order it.
        span: where ``token_ids`` lies in the ring between tokenizer and engine, with room for the answer behind it;
            None if it lies elsewhere. Whoever drives the engine releases it when the request has ended.
    """

    request_id: str
    token_ids: IntArray
    sampling: SamplingParams
    arrival_s: float
    adapter: str | None = None
    tenant_salt: str | None = None
    hints: RequestHints = RequestHints()
    span: TokenSpan | None = None


@dataclass(frozen=True, slots=True)
class TokenOutput:
    """One token of one branch of a request, or the end of the branch.

    Attributes:
        token_id: None only on an end without a token (cancel, end of an answer, error, timeout).
        finish_reason: set on a branch's last output, and only there.
        num_prompt_tokens: length of the prompt.
        num_cached_tokens: prompt tokens whose KV was reused.
        error: why, with ``FinishReason.ERROR`` and ``TIMEOUT``, and only there.
        index: which of the request's answers; 0 where it asks for one.
        more_to_come: other answers of the request have not ended.
        logprobs: if the request asks for them.

    Raises:
        ValueError: an output that says it failed and not why, or the other way round.
    """

    request_id: str
    token_id: int | None
    finish_reason: FinishReason | None
    num_prompt_tokens: int
    num_cached_tokens: int
    error: Exception | None = None
    index: int = 0
    more_to_come: bool = False
    logprobs: TokenLogprobs | None = None

    @property
    def ends_request(self) -> bool:
        """Nothing follows for this request."""
        return self.finish_reason is not None and not self.more_to_come

    def __post_init__(self) -> None:
        failed = self.finish_reason in (FinishReason.ERROR, FinishReason.TIMEOUT)
        if failed != (self.error is not None):
            raise ValueError(f"an output with {self.finish_reason} and error {self.error!r}")


class Engine(Protocol):
    """A synchronous engine with continuous batching."""

    @property
    def max_context_tokens(self) -> int:
        """Prompt and output of one request together never exceed this."""

    @property
    def max_resident_tokens(self) -> int:
        """As many of these as HBM holds at one time: a request without a limit of its own is cut off here."""

    @property
    def has_work(self) -> bool:
        """True while a request waits or runs, or a cancelled one has not been reported yet."""

    def add(self, request: GenerationRequest) -> None:
        """Queue a request.

        Raises:
            RequestTooLarge: the request can never fit.
            RequestError: the request is malformed.
        After either, the engine's state is unchanged.
        """

    def cancel(self, request_id: str) -> None:
        """End a request whose client has left; idempotent, unknown ones are ignored.

        A ``CANCELLED`` output for each of its answers follows from the next step.
        """

    def end_answer(self, request_id: str, index: int) -> None:
        """End an answer that is complete for its reader, as one with a stop string in it is; idempotent, as ``cancel``.

        A ``STOP`` output without a token follows from the next step.
        """

    def prefetch(
        self, token_ids: IntArray, adapter: str | None, tenant_salt: str | None, ttl_s: float
    ) -> PrefetchReport:
        """A prompt is expected within ``ttl_s``: begin to bring what is cached of it nearer.

        Raises:
            RequestError: there is no such adapter.
        """

    def step(self) -> list[TokenOutput]:
        """Do one model step and return what it produced.

        Raises:
            Exception: the engine is broken and no longer usable. A fault of one request is a ``TokenOutput`` instead.
        """

    def idle(self) -> None:
        """Called now and then while there is no work: drains acknowledgements, rebalances. Short."""

    def stats(self) -> dict[str, Any]:
        """Nested counters and gauges that can be written as JSON."""

    def close(self) -> None:
        """Release everything. Idempotent."""
