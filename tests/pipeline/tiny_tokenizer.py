"""A tokenizer in which every byte is a token: characters and stop strings are cut as badly as they can be."""

from __future__ import annotations

from typing import Any

from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}: {{ m['content'] }}<|im_end|>{% endfor %}"
    "{% if messages[0]['content'] == 'refuse me' %}{{ raise_exception('not that') }}{% endif %}"
    "{% if add_generation_prompt %}<|im_start|>assistant: {% endif %}"
)
SPECIAL = ["<|im_start|>", "<|im_end|>"]


def _byte_letters() -> list[str]:
    """The letter by which byte-level tokenizers write each byte: itself if it can be printed, else one above 255."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    spare = iter(range(256, 512))
    return [chr(byte if byte in printable else next(spare)) for byte in range(256)]


def tiny_hf_tokenizer(chat_template: str | None = CHAT_TEMPLATE) -> Any:
    """A ``transformers`` fast tokenizer: token 0..255 is that byte, then come the special ones."""
    backend = Backend(models.BPE(vocab={letter: byte for byte, letter in enumerate(_byte_letters())}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(SPECIAL)
    hf = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|im_end|>")
    hf.chat_template = chat_template
    return hf
