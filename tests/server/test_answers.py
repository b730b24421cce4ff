"""Several answers, log-probabilities and beam search as the official client sees them, over a real tiny model."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import pytest
import torch
from tests.engine.fake_engine import FakeEngine
from tests.pipeline.tiny_tokenizer import tiny_hf_tokenizer
from tests.server.harness import MODEL, RunningServer, serving
from tests.server.model_server import model_serving, tiny_engine, tiny_loaded

from dflash2.engine.base import FinishReason, TokenLogprobs, TokenOutput
from dflash2.engine.model_loader import LoadedModel
from dflash2.pipeline.token_bytes import TokenBytes
from dflash2.server.answer_text import AnswerText

USER = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    return tiny_loaded()


@pytest.fixture(scope="module")
def server(loaded: LoadedModel) -> Iterator[RunningServer]:
    with model_serving(tiny_engine(loaded)) as server:
        yield server


@pytest.fixture
def client(server: RunningServer) -> Iterator[openai.OpenAI]:
    with server.client() as client:
        yield client


def plain_logprobs(loaded: LoadedModel, tokens: list[int]) -> torch.Tensor:
    """The unmodified model's distribution behind each token, ``[n, V]``."""
    model: Any = loaded.model
    used = model.config._attn_implementation
    model.set_attn_implementation("sdpa")
    with torch.inference_mode():
        logits = model(torch.tensor([tokens]), use_cache=False).logits[0]
    model.set_attn_implementation(used)
    return logits.log_softmax(-1)


# -- several answers -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
def test_answers_are_numbered_and_as_repeatable_as_one(client: openai.OpenAI, stream: bool) -> None:
    def ask() -> list[str]:
        answer = client.completions.create(
            model=MODEL, prompt="once upon a time", n=4, seed=3, max_tokens=20, stream=stream
        )
        texts = [""] * 4
        reasons = [None] * 4
        for part in answer if stream else [answer]:
            for choice in part.choices:
                texts[choice.index] += choice.text
                reasons[choice.index] = choice.finish_reason
        assert reasons == ["length"] * 4
        return texts

    texts = ask()
    assert len(set(texts)) == 4 and texts == ask()
    alone = client.completions.create(model=MODEL, prompt="once upon a time", seed=3, max_tokens=20)
    assert alone.choices[0].text == texts[0]


def test_a_prompt_is_paid_once_for_all_its_answers(client: openai.OpenAI) -> None:
    answer = client.completions.create(model=MODEL, prompt=["abc", "defgh"], n=3, max_tokens=5)
    assert [choice.index for choice in answer.choices] == list(range(6))
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (8, 30)
    *_, last = client.chat.completions.create(
        model=MODEL, messages=USER, n=2, max_tokens=4, stream=True, stream_options={"include_usage": True}
    )
    assert last.usage.completion_tokens == 8 and last.usage.prompt_tokens == len("user: hiassistant: ") + 3


def test_chats_have_several_answers_too(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model=MODEL, messages=USER, n=3, max_tokens=6)
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    chunks = client.chat.completions.create(model=MODEL, messages=USER, n=3, max_tokens=6, stream=True)
    reasons = {c.index: c.finish_reason for chunk in chunks for c in chunk.choices if c.finish_reason}
    assert reasons == {0: "length", 1: "length", 2: "length"}


def test_a_stop_string_ends_only_the_answer_that_has_it(client: openai.OpenAI) -> None:
    asked = {"model": MODEL, "prompt": [60, 61, 62, 63], "n": 3, "seed": 5, "max_tokens": 24}
    whole = [choice.text for choice in client.completions.create(**asked).choices]
    stop = next(char for char in whole[0] if char not in whole[1] and char != "\ufffd")
    cut = client.completions.create(**asked, stop=[stop]).choices
    assert cut[0].text == whole[0][: whole[0].index(stop)] and cut[0].finish_reason == "stop"
    assert cut[1].text == whole[1] and cut[1].finish_reason == "length"


def test_answers_are_right_while_they_are_swapped() -> None:
    """2 KiB a token: HBM holds 512 of them, the answers to six prompts together some 2,000."""
    loaded = tiny_loaded(num_hidden_layers=4, head_dim=32)
    prompts = [f"a story that begins with number {number} and goes on " for number in range(6)]

    def ask(server: RunningServer) -> list[list[str]]:
        with server.client() as client, ThreadPoolExecutor(6) as pool:
            answers = pool.map(
                lambda prompt: client.completions.create(model=MODEL, prompt=prompt, n=4, seed=1, max_tokens=60),
                prompts,
            )
            return [[choice.text for choice in answer.choices] for answer in answers]

    with model_serving(tiny_engine(loaded, memory={"hbm_capacity_mb": 16})) as roomy:
        expected = ask(roomy)
    with model_serving(tiny_engine(loaded, scheduling={"quantum_tokens": 4})) as tight:
        assert ask(tight) == expected
        stats = tight.get("/dflash2/stats").json()
        assert stats["scheduler"]["preemptions_swapped"] > 0 and stats["counters"]["swap_in_blocks"] > 0
        assert stats["counters"]["recomputed_tokens"] == 0 and stats["reserved_blocks"] == 0


# -- log-probabilities -----------------------------------------------------------------------------------------------


def test_logprobs_of_a_completion(client: openai.OpenAI, loaded: LoadedModel) -> None:
    prompt = list(b"log")
    answer = client.completions.create(model=MODEL, prompt=prompt, max_tokens=8, temperature=0, logprobs=2)
    choice = answer.choices[0]
    told = choice.logprobs
    assert len(told.tokens) == len(told.token_logprobs) == len(told.top_logprobs) == len(told.text_offset) == 8
    chosen = [int(piece[8:], 16) if piece.startswith("bytes:") else ord(piece) for piece in told.tokens]
    reference = plain_logprobs(loaded, [*prompt, *chosen])[len(prompt) - 1 : -1]
    for row, token, logprob, top in zip(reference, chosen, told.token_logprobs, told.top_logprobs, strict=True):
        assert logprob == pytest.approx(float(row[token]), abs=1e-4)
        assert sorted(top.values(), reverse=True) == pytest.approx(row.topk(2).values.tolist(), abs=1e-4)
    assert told.text_offset[0] == 0 and told.text_offset == sorted(told.text_offset)


def test_logprobs_of_a_chat_whole_and_streamed(client: openai.OpenAI) -> None:
    asked = {"model": MODEL, "messages": USER, "max_tokens": 12, "temperature": 0, "logprobs": True, "top_logprobs": 3}
    whole = client.chat.completions.create(**asked).choices[0].logprobs.content
    assert len(whole) == 12 and all(len(entry.top_logprobs) == 3 for entry in whole)
    assert all(entry.top_logprobs[0].bytes == entry.bytes for entry in whole)
    parts = client.chat.completions.create(**asked, stream=True)
    streamed = [e for part in parts for choice in part.choices if choice.logprobs for e in choice.logprobs.content]
    assert [entry.bytes for entry in streamed] == [entry.bytes for entry in whole]
    bare = client.chat.completions.create(**{**asked, "top_logprobs": None}).choices[0].logprobs.content
    assert all(entry.top_logprobs == [] for entry in bare)
    assert client.chat.completions.create(model=MODEL, messages=USER, max_tokens=2).choices[0].logprobs is None


def test_top_logprobs_need_logprobs(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="needs logprobs"):
        client.chat.completions.create(model=MODEL, messages=USER, top_logprobs=2)
    with pytest.raises(openai.BadRequestError, match="less than or equal to 20"):
        client.completions.create(model=MODEL, prompt="a", logprobs=21)


def answer_text(stops: list[str]) -> AnswerText:
    backend = tiny_hf_tokenizer().backend_tokenizer
    return AnswerText(0, lambda ids: backend.decode(ids, skip_special_tokens=True), TokenBytes(backend), [], stops)


def output(token: int, reason: FinishReason | None = None) -> TokenOutput:
    return TokenOutput("r", token, reason, 1, 0, logprobs=TokenLogprobs(-float(token), (token,), (-float(token),)))


def test_tokens_are_told_with_their_text_and_those_of_a_stop_string_never() -> None:
    answer = answer_text(["cd"])
    deltas = [answer.push(output(token)) for token in b"a\xc3\xa9bcd"]
    told = [(delta.text, [entry.raw for entry in delta.tokens]) for delta in deltas if delta is not None]
    assert told == [("a", [b"a"]), ("é", [b"\xc3", b"\xa9"]), ("b", [b"b"]), ("", [])]
    assert answer.ended and deltas[-1].finish_reason == "stop"


def test_the_token_that_stops_is_not_told() -> None:
    answer = answer_text([])
    assert answer.push(output(ord("x"))).tokens[0].raw == b"x"
    last = answer.push(output(257, FinishReason.STOP))
    assert (last.text, last.tokens, last.finish_reason, last.num_output_tokens) == ("", (), "stop", 2)


def test_bytes_of_tokens() -> None:
    look_up = TokenBytes(tiny_hf_tokenizer().backend_tokenizer)
    assert [look_up(byte) for byte in range(256)] == [bytes([byte]) for byte in range(256)]
    assert look_up(256) == b"<|im_start|>" and look_up(5_000) == b""


# -- beams -----------------------------------------------------------------------------------------------------------


def test_best_of_is_the_number_of_beams(client: openai.OpenAI) -> None:
    asked = {"model": MODEL, "prompt": "beam", "max_tokens": 10}
    wide = client.completions.create(**asked, best_of=4, n=1, extra_body={"use_beam_search": True})
    four = client.completions.create(**asked, n=4, extra_body={"use_beam_search": True})
    assert len(wide.choices) == 1 and len(four.choices) == 4
    assert wide.choices[0].text == four.choices[0].text
    assert wide.usage.completion_tokens == 10


def test_what_does_not_go_with_beams_is_refused_before_anything_is_tokenised() -> None:
    engine = FakeEngine()
    with serving(engine) as server, server.client() as client:
        with pytest.raises(openai.BadRequestError, match="cannot be combined"):
            client.completions.create(model=MODEL, prompt="a", stop="x", extra_body={"use_beam_search": True})
        assert engine.added == []
