"""The routes as the official client sees them."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import openai
import pytest
from tests.engine.fake_engine import FakeEngine
from tests.server.harness import MODEL, RunningServer, serving, until

USER = [{"role": "user", "content": "hi"}]
RENDERED = "<|im_start|>user: hi<|im_end|><|im_start|>assistant: "
ECHO = "user: hiassistant: "
"""What the scripted engine answers to ``USER``: the prompt without its special tokens."""
NUM_PROMPT = len(ECHO) + 3


@pytest.fixture(scope="module")
def engine() -> FakeEngine:
    return FakeEngine()


@pytest.fixture(scope="module")
def server(engine: FakeEngine) -> Iterator[RunningServer]:
    with serving(engine) as server:
        yield server


@pytest.fixture
def client(server: RunningServer) -> Iterator[openai.OpenAI]:
    with server.client() as client:
        yield client


def test_chat(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model=MODEL, messages=USER, max_tokens=NUM_PROMPT)
    assert answer.object == "chat.completion"
    assert answer.id.startswith("chatcmpl-")
    assert answer.model == MODEL
    choice = answer.choices[0]
    assert (choice.message.role, choice.message.content, choice.finish_reason) == ("assistant", ECHO, "length")
    usage = answer.usage
    assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (
        NUM_PROMPT,
        NUM_PROMPT,
        2 * NUM_PROMPT,
    )


def test_chat_without_a_limit_may_use_the_whole_context(client: openai.OpenAI, engine: FakeEngine) -> None:
    answer = client.chat.completions.create(model=MODEL, messages=USER)
    assert answer.usage.total_tokens == engine.max_context_tokens


def test_chat_without_a_limit_ends_where_hbm_does() -> None:
    with serving(FakeEngine(resident_tokens=300)) as server, server.client() as client:
        answer = client.chat.completions.create(model=MODEL, messages=USER)
        assert answer.usage.total_tokens == 300 and answer.choices[0].finish_reason == "length"


def test_chat_streamed(client: openai.OpenAI) -> None:
    chunks = list(client.chat.completions.create(model=MODEL, messages=USER, max_tokens=NUM_PROMPT, stream=True))
    assert {chunk.object for chunk in chunks} == {"chat.completion.chunk"}
    assert len({chunk.id for chunk in chunks}) == 1
    first, *middle, last = [chunk.choices[0] for chunk in chunks]
    assert (first.delta.role, first.delta.content) == ("assistant", "")
    assert "".join(choice.delta.content for choice in middle) == ECHO
    assert [choice.finish_reason for choice in middle] == [None] * len(middle)
    assert (last.delta.content, last.finish_reason) == (None, "length")
    assert all(chunk.usage is None for chunk in chunks)


def test_usage_of_a_stream_comes_last_if_asked_for(client: openai.OpenAI) -> None:
    stream = client.chat.completions.create(
        model=MODEL, messages=USER, max_tokens=4, stream=True, stream_options={"include_usage": True}
    )
    *chunks, last = list(stream)
    assert all(chunk.usage is None and chunk.choices for chunk in chunks)
    assert last.choices == []
    assert (last.usage.prompt_tokens, last.usage.completion_tokens) == (NUM_PROMPT, 4)


def test_cached_tokens_are_reported(client: openai.OpenAI) -> None:
    def cached(**options: object) -> int:
        answer = client.completions.create(model=MODEL, prompt="cache me", max_tokens=1, **options)
        return answer.usage.prompt_tokens_details.cached_tokens

    assert [cached(), cached()] == [0, 7]
    salted = {"extra_body": {"cache_salt": "tenant"}}
    assert [cached(**salted), cached(**salted)] == [0, 7]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("prompt", "texts"),
    [
        ("abc", ["abcab"]),
        (["abc", "é漢"], ["abcab", "é漢"]),
        ([104, 105], ["hihih"]),
        ([[104, 105], [33]], ["hihih", "!!!!!"]),
    ],
)
def test_every_shape_of_prompt(client: openai.OpenAI, prompt: object, texts: list[str], stream: bool) -> None:
    answer = client.completions.create(model=MODEL, prompt=prompt, max_tokens=5, stream=stream)
    found = [""] * len(texts)
    reasons: list[str | None] = [None] * len(texts)
    for part in answer if stream else [answer]:
        for choice in part.choices:
            found[choice.index] += choice.text
            reasons[choice.index] = choice.finish_reason
    assert found == texts
    assert reasons == ["length"] * len(texts)
    if not stream:
        assert answer.usage.completion_tokens == 5 * len(texts)
        assert answer.object == "text_completion"


def test_usage_of_several_prompts_is_their_sum_when_streamed_too(client: openai.OpenAI) -> None:
    *_, last = client.completions.create(
        model=MODEL, prompt=["abc", "de"], max_tokens=3, stream=True, stream_options={"include_usage": True}
    )
    assert (last.usage.prompt_tokens, last.usage.completion_tokens, last.usage.total_tokens) == (5, 6, 11)


def test_completions_default_to_sixteen_tokens(client: openai.OpenAI) -> None:
    assert client.completions.create(model=MODEL, prompt="a").usage.completion_tokens == 16


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_string_ends_the_text_and_the_engines_work(
    client: openai.OpenAI, engine: FakeEngine, stream: bool
) -> None:
    before = len(engine.cancelled)
    answer = client.completions.create(model=MODEL, prompt="one STOP two", max_tokens=900, stop="STOP", stream=stream)
    choices = [part.choices[0] for part in answer] if stream else answer.choices
    assert "".join(choice.text for choice in choices) == "one "
    assert choices[-1].finish_reason == "stop"
    until(lambda: len(engine.cancelled) == before + 1)
    assert engine.ended_answers[-1] == (engine.cancelled[-1], 0)  # first, so that it has ended and is not cancelled


def test_several_stop_strings(client: openai.OpenAI) -> None:
    answer = client.completions.create(model=MODEL, prompt="one two", max_tokens=90, stop=["x", "wo", "e t"])
    assert answer.choices[0].text == "on"


def test_a_stop_token_ends_the_text_and_is_not_in_it(client: openai.OpenAI) -> None:
    answer = client.completions.create(
        model=MODEL, prompt="ab!c", max_tokens=90, extra_body={"stop_token_ids": [ord("!")]}
    )
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == ("ab", "stop")
    assert answer.usage.completion_tokens == 3


def test_text_held_back_for_a_stop_string_appears_at_the_end(client: openai.OpenAI) -> None:
    answer = client.completions.create(model=MODEL, prompt="abST", max_tokens=4, stop="STOP")
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == ("abST", "length")


def test_streams_contain_whole_characters_only(client: openai.OpenAI) -> None:
    parts = [
        chunk.choices[0].text
        for chunk in client.completions.create(model=MODEL, prompt="é漢😀", max_tokens=2 * 9 + 5, stream=True)
    ]
    assert [part for part in parts if part] == list("é漢😀é漢😀é漢")


def test_sampling_reaches_the_engine(client: openai.OpenAI, engine: FakeEngine) -> None:
    client.chat.completions.create(
        model="alias",
        messages=USER,
        max_tokens=900,
        max_completion_tokens=2,
        temperature=0.5,
        top_p=0.25,
        seed=7,
        extra_body={"top_k": 3, "stop_token_ids": [1, 2], "ignore_eos": True, "cache_salt": "s"},
    )
    request = engine.added[-1]
    sampling = request.sampling
    assert (sampling.max_tokens, sampling.temperature, sampling.top_p, sampling.top_k) == (2, 0.5, 0.25, 3)
    assert (set(sampling.stop_token_ids), sampling.ignore_eos, sampling.seed) == ({1, 2}, True, 7)
    assert request.tenant_salt == "s"
    assert request.arrival_s > 0


def test_fields_that_ask_for_nothing_are_accepted(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model=MODEL,
        messages=USER,
        max_tokens=1,
        n=1,
        logprobs=False,
        tools=[],
        tool_choice="none",
        frequency_penalty=0,
        presence_penalty=0.0,
        response_format={"type": "text"},
        user="u",
        metadata={"a": "b"},
        store=False,
        logit_bias=None,
        stop=None,
        temperature=None,
    )
    assert answer.usage.completion_tokens == 1


def test_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [MODEL, "alias"]
    assert client.models.retrieve(MODEL).id == MODEL
    with pytest.raises(openai.NotFoundError) as caught:
        client.models.retrieve("other")
    assert caught.value.code == "model_not_found"


def test_many_streams_at_once_do_not_mix(server: RunningServer) -> None:
    async def one(i: int) -> None:
        text = f"client {i} says é漢😀 "
        async with server.async_client() as client:
            stream = await client.completions.create(model=MODEL, prompt=text, max_tokens=300, stream=True)
            got = "".join([chunk.choices[0].text async for chunk in stream])
        expected = (text * 30).encode()[:300].decode(errors="ignore")
        assert got == expected

    async def main() -> None:
        await asyncio.gather(*(one(i) for i in range(32)))

    asyncio.run(main())


def test_the_whole_prompt_reaches_the_engine(client: openai.OpenAI, engine: FakeEngine) -> None:
    client.chat.completions.create(model=MODEL, messages=USER, max_tokens=1)
    prompt = RENDERED.replace("<|im_start|>", "\x00").replace("<|im_end|>", "\x01").encode()
    assert engine.added[-1].token_ids.tolist() == [256 + byte if byte < 2 else byte for byte in prompt]
