"""Adapters over HTTP: loaded, listed, used, unloaded; bad ones are refused and leave the server as it was."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pytest
from tests.engine.fake_engine import FakeEngine
from tests.engine.lora_case import make_adapter, peft_answer
from tests.pipeline.tiny_tokenizer import tiny_hf_tokenizer
from tests.server.harness import MODEL, RunningServer, serving
from tests.server.model_server import model_serving, tiny_engine, tiny_loaded

PROMPT = list(b"say it")


@pytest.fixture(scope="module")
def plain() -> Any:
    return tiny_loaded().model


@pytest.fixture(scope="module")
def folder(plain: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("adapters")
    for seed in range(4):
        make_adapter(plain, root / f"a{seed}", seed)
    make_adapter(plain, root / "wide", 9, r=32)
    return root


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[RunningServer]:
    lora = {"adapters": {"first": str(folder / "a0")}, "directory": str(folder), "max_loaded": 2}
    engine = tiny_engine(tiny_loaded(), lora=lora)
    with model_serving(engine, adapters=engine.adapters) as server:
        yield server


def text(plain: Any, adapter: Path | None) -> str:
    tokens = peft_answer(plain, adapter, PROMPT, 10)
    return str(tiny_hf_tokenizer().backend_tokenizer.decode(tokens, skip_special_tokens=True)).rstrip("\ufffd")


def said(client: openai.OpenAI, model: str) -> str:
    answer = client.completions.create(
        model=model, prompt=PROMPT, max_tokens=10, temperature=0, extra_body={"ignore_eos": True}
    )
    assert answer.model == model
    return answer.choices[0].text


def test_an_adapter_comes_and_goes_under_its_name(server: RunningServer, plain: Any, folder: Path) -> None:
    with server.client() as client:
        assert [model.id for model in client.models.list()] == [MODEL, "alias", "first"]
        answer = server.post("/v1/load_lora_adapter", {"lora_name": "second", "lora_path": "a1"})
        assert answer.status_code == 200 and answer.json()["rank"] == 4
        assert client.models.retrieve("second").model_extra["parent"] == MODEL
        with ThreadPoolExecutor(6) as pool:
            names = ["first", "second", MODEL] * 2
            found = list(pool.map(lambda name: said(client, name), names))
        expected = [text(plain, folder / "a0"), text(plain, folder / "a1"), text(plain, None)] * 2
        assert found == expected and len(set(expected)) == 3
        assert server.post("/v1/unload_lora_adapter", {"lora_name": "second"}).json()["deleted"]
        with pytest.raises(openai.NotFoundError, match="no model 'second'"):
            said(client, "second")
        server.post("/v1/load_lora_adapter", {"lora_name": "second", "lora_path": "a2"})
        assert said(client, "second") == text(plain, folder / "a2")
        server.post("/v1/unload_lora_adapter", {"lora_name": "second"})


@pytest.mark.parametrize(
    ("body", "status", "param", "message"),
    [
        ({"lora_name": "x", "lora_path": "../elsewhere"}, 400, "lora_path", "must lie in the folder"),
        ({"lora_name": "x", "lora_path": "/etc"}, 400, "lora_path", "must lie in the folder"),
        ({"lora_name": "x", "lora_path": "nothing"}, 400, "lora_path", "adapter_config.json"),
        ({"lora_name": "x", "lora_path": "wide"}, 400, "lora_path", "takes up to 16"),
        ({"lora_name": "first", "lora_path": "a1"}, 400, "lora_name", "in use"),
        ({"lora_name": MODEL, "lora_path": "a1"}, 400, "lora_name", "in use"),
        ({"lora_name": "../x", "lora_path": "a1"}, 400, "lora_name", "must begin with"),
        ({"lora_name": "x"}, 400, "lora_path", "is required"),
        ({"lora_name": "x", "lora_path": "a1", "more": 1}, 400, "more", "unknown field"),
    ],
)
def test_bad_adapters(server: RunningServer, body: dict[str, Any], status: int, param: str, message: str) -> None:
    answer = server.post("/v1/load_lora_adapter", body)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (status, param) and message in error["message"]
    assert "first" in [model["id"] for model in server.get("/v1/models").json()["data"]]


def test_unloading_what_is_not_there(server: RunningServer) -> None:
    assert server.post("/v1/unload_lora_adapter", {"lora_name": "nobody"}).status_code == 404


def test_the_statistics_tell_of_adapters(server: RunningServer) -> None:
    stats = server.get("/dflash2/stats").json()["adapters"]
    assert stats["registered"] == 1 and stats["slots"] == 2 and stats["pinned_adapters"] == 0


def test_a_server_without_room_for_adapters_says_so() -> None:
    with serving(FakeEngine()) as server:
        answer = server.post("/v1/load_lora_adapter", {"lora_name": "x", "lora_path": "y"})
        assert answer.status_code == 400 and "--lora" in answer.json()["error"]["message"]


with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import peft  # noqa: F401 - once, so that what it warns of is not an error of the first test
