"""Chat messages to the text that the model was trained on, by the model's own template."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from dflash2.errors import RequestError

ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
"""Accepted roles and what the template sees: ``developer`` is the newer name of ``system``."""


class ChatRenderer:
    """Renders chats with the tokenizer's Jinja template.

    Args:
        hf: a tokenizer of ``transformers``.
        template: used instead of the tokenizer's own.
    """

    def __init__(self, hf: Any, template: str | None = None) -> None:
        self._hf = hf
        self._template = template if template is not None else getattr(hf, "chat_template", None)

    def render(self, messages: Sequence[Mapping[str, Any]]) -> str:
        """The prompt text, ready for the assistant's turn.

        Args:
            messages: ``{"role": ..., "content": text or list of text parts, "name": optional}`` each.

        Raises:
            RequestError: no messages, a role or a content that is not supported, no template,
                or the template refuses the chat.
        """
        import jinja2

        if not messages:
            raise RequestError("messages must not be empty", param="messages")
        if not self._template:
            raise RequestError(
                "this model has no chat template: use /v1/completions, or start the server with --chat-template",
                param="messages",
            )
        chat = [_plain(message, f"messages[{index}]") for index, message in enumerate(messages)]
        try:
            text = self._hf.apply_chat_template(
                chat, chat_template=self._template, tokenize=False, add_generation_prompt=True
            )
        except jinja2.TemplateError as error:
            raise RequestError(
                f"the model's chat template refuses these messages: {error}", param="messages"
            ) from error
        return str(text)


def _plain(message: Mapping[str, Any], where: str) -> dict[str, str]:
    """One message as the template expects it: text content only."""
    if not isinstance(message, Mapping):
        raise RequestError(f"{where} must be an object with role and content", param=where)
    role = message.get("role")
    if not isinstance(role, str) or role not in ROLES:
        raise RequestError(f"{where}.role must be one of {', '.join(ROLES)}, not {role!r}", param=f"{where}.role")
    unknown = sorted(key for key, value in message.items() if key not in ("role", "content", "name") and value)
    if unknown:
        raise RequestError(f"{where}.{unknown[0]} is not supported", param=f"{where}.{unknown[0]}")
    plain = {"role": ROLES[role], "content": _text(message.get("content"), f"{where}.content")}
    name = message.get("name")
    if name is not None:
        if not isinstance(name, str):
            raise RequestError(f"{where}.name must be a string", param=f"{where}.name")
        plain["name"] = name
    return plain


def _text(content: object, where: str) -> str:
    """The text of a message's content."""
    if isinstance(content, str):
        return content
    if not isinstance(content, Sequence) or not content:
        raise RequestError(f"{where} must be a string or a list of text parts", param=where)
    return "".join(_part_text(part, f"{where}[{index}]") for index, part in enumerate(content))


def _part_text(part: object, where: str) -> str:
    if not isinstance(part, Mapping) or part.get("type") != "text":
        kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
        raise RequestError(f"{where}: only parts of type 'text' are supported, not {kind!r}", param=where)
    text = part.get("text")
    if not isinstance(text, str):
        raise RequestError(f"{where}.text must be a string", param=f"{where}.text")
    return text
