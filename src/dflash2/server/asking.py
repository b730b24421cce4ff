"""From the fields of a request to what the engine is asked."""

from __future__ import annotations

from dflash2.engine.base import RequestHints
from dflash2.engine.sampling import MAX_BEAM_WIDTH, SamplingParams
from dflash2.server.errors import ApiError
from dflash2.server.schema import GenerationBody


def sampling_of(body: GenerationBody, max_tokens: int) -> SamplingParams:
    """How the answers are chosen.

    Args:
        body: checked.
        max_tokens: of each answer.

    Raises:
        ApiError: fields that contradict each other.
    """
    return SamplingParams(
        max_tokens=max_tokens,
        temperature=1.0 if body.temperature is None else body.temperature,
        top_p=1.0 if body.top_p is None else body.top_p,
        top_k=body.top_k if body.top_k is not None and body.top_k > 0 else None,
        stop_token_ids=tuple(body.stop_token_ids or ()),
        ignore_eos=bool(body.ignore_eos),
        seed=body.seed,
        n=body.num_answers,
        logprobs=body.num_top_logprobs,
        beam_width=_beam_width(body),
        length_penalty=1.0 if body.length_penalty is None else body.length_penalty,
    )


def hints_of(body: GenerationBody) -> RequestHints:
    """What helps to place and order the request."""
    return RequestHints(body.session_id, body.ttl_s, body.priority or 0, bool(body.pin))


def _beam_width(body: GenerationBody) -> int | None:
    """As vLLM names it: ``use_beam_search`` with ``best_of`` beams, ``n`` of them are answers."""
    if not body.use_beam_search:
        if body.best_of is not None and body.best_of != body.num_answers:
            raise ApiError(400, "best_of other than n needs use_beam_search", param="best_of")
        if body.length_penalty is not None:
            raise ApiError(400, "length_penalty needs use_beam_search", param="length_penalty")
        return None
    # Beams are compared by the model's own probabilities, and text is known only when they have ended.
    unfit = {
        "temperature": body.temperature not in (None, 0, 1),
        "top_p": body.top_p not in (None, 1),
        "top_k": body.top_k is not None and body.top_k > 0,
        "stop": bool(body.stop),
        "logprobs": body.num_top_logprobs is not None,
    }
    for name, is_set in unfit.items():
        if is_set:
            raise ApiError(400, f"{name} cannot be combined with use_beam_search", param=name)
    width = body.num_answers if body.best_of is None else body.best_of
    if width > MAX_BEAM_WIDTH:
        param = "n" if body.best_of is None else "best_of"
        raise ApiError(400, f"at most {MAX_BEAM_WIDTH} beams, not {width}", param=param)
    if width < body.num_answers:
        raise ApiError(400, f"best_of is {width}, fewer than the n = {body.num_answers} answers", param="best_of")
    return width
