from __future__ import annotations

from typing import Any

import pytest
from tests.pipeline.tiny_tokenizer import tiny_hf_tokenizer

from dflash2.errors import RequestError
from dflash2.pipeline.chat import ChatRenderer

CHAT = ChatRenderer(tiny_hf_tokenizer())


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


def test_messages_become_the_models_format() -> None:
    text = CHAT.render([{"role": "system", "content": "S"}, user("U"), {"role": "assistant", "content": "A"}, user("")])
    assert text == (
        "<|im_start|>system: S<|im_end|><|im_start|>user: U<|im_end|><|im_start|>assistant: A<|im_end|>"
        "<|im_start|>user: <|im_end|><|im_start|>assistant: "
    )


def test_text_parts_are_joined() -> None:
    assert "user: ab<" in CHAT.render([user([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}])])


def test_developer_is_the_system() -> None:
    assert CHAT.render([{"role": "developer", "content": "D"}]).startswith("<|im_start|>system: D")


def test_a_name_reaches_the_template() -> None:
    chat = ChatRenderer(tiny_hf_tokenizer(), template="{{ messages[0]['name'] }}")
    assert chat.render([{"role": "user", "content": "x", "name": "ann"}]) == "ann"


def test_a_given_template_replaces_the_models_own() -> None:
    assert ChatRenderer(tiny_hf_tokenizer(), template="[{{ messages[0]['content'] }}]").render([user("x")]) == "[x]"


@pytest.mark.parametrize(
    ("messages", "param", "says"),
    [
        ([], "messages", "empty"),
        (["x"], "messages[0]", "object"),
        ([user("x"), {"content": "x"}], "messages[1].role", "role"),
        ([{"role": "tool", "content": "x"}], "messages[0].role", "'tool'"),
        ([{"role": ["user"], "content": "x"}], "messages[0].role", "role"),
        ([user(None)], "messages[0].content", "string"),
        ([user(3)], "messages[0].content", "string"),
        ([user([])], "messages[0].content", "string"),
        ([user(["x"])], "messages[0].content[0]", "'str'"),
        ([user([{"type": "text", "text": "x"}, {"type": "image_url"}])], "messages[0].content[1]", "'image_url'"),
        ([user([{"type": "text"}])], "messages[0].content[0].text", "string"),
        ([{**user("x"), "tool_calls": [1]}], "messages[0].tool_calls", "not supported"),
        ([{**user("x"), "name": 3}], "messages[0].name", "string"),
        ([user("refuse me")], "messages", "not that"),
    ],
)
def test_what_cannot_be_rendered_is_refused(messages: list[Any], param: str, says: str) -> None:
    with pytest.raises(RequestError, match=says) as caught:
        CHAT.render(messages)
    assert caught.value.param == param


def test_a_model_without_a_template_says_what_to_do() -> None:
    with pytest.raises(RequestError, match="/v1/completions"):
        ChatRenderer(tiny_hf_tokenizer(chat_template=None)).render([user("x")])
