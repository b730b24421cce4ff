"""What a request may contain. A field that has no effect here is either harmless by its nature or refused."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from dflash2.engine.sampling import MAX_ANSWERS, MAX_LOGPROBS
from dflash2.server.errors import ApiError

HARMLESS = frozenset(
    {
        "metadata",
        "parallel_tool_calls",
        "prompt_cache_key",
        "prompt_cache_retention",
        "safety_identifier",
        "service_tier",
        "store",
        "user",
    }
)
"""Accepted and without effect: they say nothing about the text that is wanted."""

NEUTRAL: dict[str, tuple[Any, ...]] = {
    "audio": (),
    "echo": (False,),
    "frequency_penalty": (0,),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "logit_bias": ({},),
    "modalities": (["text"],),
    "prediction": (),
    "presence_penalty": (0,),
    "reasoning_effort": (),
    "response_format": ({"type": "text"},),
    "suffix": ("",),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "verbosity": (),
    "web_search_options": (),
}
"""Fields of OpenAI's API that are not supported, with the values (besides null) that ask for nothing."""

MAX_STOP_STRINGS = 16
MAX_PROMPTS = 128
MAX_CHOICES = 128
MAX_SEED = 2**63 - 1

StopString = Annotated[str, Field(min_length=1, max_length=1024)]
TokenId = Annotated[int, Field(ge=0, lt=2**31)]


class StreamOptions(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    include_usage: bool | None = None
    include_obfuscation: bool | None = None
    """Accepted; no padding is ever added."""


class GenerationBody(BaseModel):
    """Fields that both kinds of completion have."""

    model_config = ConfigDict(extra="forbid", strict=True)

    model: str
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2, allow_inf_nan=False)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1, allow_inf_nan=False)] | None = None
    top_k: Annotated[int, Field(ge=-1)] | None = None
    """-1, 0 and null: no limit."""
    seed: Annotated[int, Field(ge=-MAX_SEED - 1, le=MAX_SEED)] | None = None
    stop: StopString | Annotated[list[StopString], Field(max_length=MAX_STOP_STRINGS)] | None = None
    stop_token_ids: Annotated[list[TokenId], Field(max_length=64)] | None = None
    ignore_eos: bool | None = None
    n: Annotated[int, Field(ge=1, le=MAX_ANSWERS)] | None = None
    best_of: Annotated[int, Field(ge=1, le=MAX_ANSWERS)] | None = None
    """With ``use_beam_search`` the number of beams; otherwise only what ``n`` is."""
    use_beam_search: bool | None = None
    length_penalty: Annotated[float, Field(ge=-10, le=10, allow_inf_nan=False)] | None = None
    cache_salt: Annotated[str, Field(min_length=1, max_length=1024)] | None = None
    """Cached blocks are shared only among requests with the same salt."""
    session_id: Annotated[str, Field(min_length=1, max_length=256)] | None = None
    """The conversation that the request belongs to."""
    ttl_s: Annotated[float, Field(gt=0, le=86400, allow_inf_nan=False)] | None = None
    """How long the pin lasts, from the end of the answer on."""
    priority: Annotated[int, Field(ge=-1000, le=1000)] | None = None
    """Smaller goes first."""
    pin: bool | None = None
    """Keep the prompt's blocks for ``ttl_s``. The pin of a session's next request takes the place of this one."""

    @property
    def stop_strings(self) -> list[str]:
        """``stop`` as a list."""
        return [self.stop] if isinstance(self.stop, str) else list(self.stop or ())

    @property
    def num_answers(self) -> int:
        """Answers per prompt."""
        return self.n or 1

    @property
    def num_top_logprobs(self) -> int | None:
        """Likeliest tokens to tell at each position; None for no log-probabilities at all."""
        return None

    @property
    def wants_stream_usage(self) -> bool:
        """Whether a last chunk with the usage is asked for."""
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def output_limit(self) -> int | None:
        """Most tokens to generate; None for what is customary."""
        return self.max_tokens


class ChatBody(GenerationBody):
    """``POST /v1/chat/completions``. The messages are checked where they are rendered."""

    messages: list[dict[str, Any]]
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    """Newer name of ``max_tokens``; wins if both are there."""
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None

    @property
    def num_top_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def output_limit(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens


class PrefetchBody(BaseModel):
    """``POST /dflash2/prefetch``: a prompt that will come soon, as it will be sent then."""

    model_config = ConfigDict(extra="forbid", strict=True)

    model: str
    prompt: Any = None
    """Text or token ids; one prompt."""
    messages: list[dict[str, Any]] | None = None
    cache_salt: Annotated[str, Field(min_length=1, max_length=1024)] | None = None
    ttl_s: Annotated[float, Field(gt=0, le=3600, allow_inf_nan=False)] = 60.0
    """For how long it is expected."""


class CompletionBody(GenerationBody):
    """``POST /v1/completions``."""

    prompt: Any
    logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | Literal[False] | None = None

    @property
    def num_top_logprobs(self) -> int | None:
        return None if self.logprobs is False else self.logprobs

    @property
    def prompts(self) -> list[str | list[int]]:
        """One entry per choice: text or token ids.

        Raises:
            ApiError: 400 if the prompt is of none of the four accepted shapes, or empty.
        """
        return parse_prompts(self.prompt)


Body = TypeVar("Body", bound=GenerationBody)


def parse_body(kind: type[Body], value: Mapping[str, Any]) -> Body:
    """Check a request.

    Raises:
        ApiError: 400, naming the first field that is wrong, unknown or not supported.
    """
    fields = {name: item for name, item in value.items() if name not in HARMLESS and not _is_neutral(name, item)}
    unsupported = next((name for name in fields if name in NEUTRAL), None)
    if unsupported is not None:
        allowed = " or ".join(["null", *(repr(item) for item in NEUTRAL[unsupported])])
        raise ApiError(
            400, f"{unsupported} is not supported: only {allowed}", param=unsupported, code="unsupported_parameter"
        )
    try:
        body = kind.model_validate(fields)
    except ValidationError as error:
        raise first_fault(error) from None
    if body.stream_options is not None and not body.stream:
        raise ApiError(400, "stream_options is only allowed together with stream", param="stream_options")
    if isinstance(body, ChatBody) and body.top_logprobs and not body.logprobs:
        raise ApiError(400, "top_logprobs needs logprobs: true", param="top_logprobs")
    if body.pin and body.ttl_s is None:
        raise ApiError(400, "pin needs ttl_s: for how long", param="pin")
    if body.ttl_s is not None and not body.pin:
        raise ApiError(400, "ttl_s is how long a pin lasts: it needs pin: true", param="ttl_s")
    return body


def parse_prompts(value: object) -> list[str | list[int]]:
    """Normalise a prompt: a string, a list of strings, a list of token ids, or a list of such lists."""
    if isinstance(value, str):
        prompts: list[str | list[int]] = [value]
    elif not isinstance(value, list):
        raise _bad_prompt()
    elif _are_token_ids(value):
        prompts = [value]
    elif value and (all(isinstance(item, str) for item in value) or all(_are_token_ids(item) for item in value)):
        prompts = list(value)
    else:
        raise _bad_prompt()
    if len(prompts) > MAX_PROMPTS:
        raise ApiError(400, f"at most {MAX_PROMPTS} prompts in one request, not {len(prompts)}", param="prompt")
    if not all(prompts):
        raise ApiError(400, "prompt must not be empty", param="prompt")
    return prompts


def _are_token_ids(value: object) -> bool:
    return isinstance(value, list) and bool(value) and all(type(item) is int for item in value)


def _bad_prompt() -> ApiError:
    return ApiError(
        400,
        "prompt must be a string, a list of strings, a list of token ids, or a list of lists of token ids; not empty",
        param="prompt",
    )


def _is_neutral(name: str, value: object) -> bool:
    return name in NEUTRAL and (value is None or value in NEUTRAL[name])


def first_fault(error: ValidationError) -> ApiError:
    """The first fault, in a sentence."""
    first = error.errors(include_url=False, include_input=False)[0]
    where = ".".join(str(key) for key in first["loc"])
    if first["type"] == "extra_forbidden":
        return ApiError(400, f"unknown field: {where}", param=where, code="unknown_parameter")
    if first["type"] == "missing":
        return ApiError(400, f"{where} is required", param=where, code="missing_required_parameter")
    # Further inside, the location may name a type of a union instead of a field.
    param, message = str(first["loc"][0]), first["msg"]
    return ApiError(400, f"{param}: {message[0].lower()}{message[1:]}", param=param, code="invalid_value")
