"""Text to ``Config``: strict JSON, and one error that lists every problem."""

from __future__ import annotations

import codecs
import json
import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

from pydantic import ValidationError

from dflash2.config.problems import JSONPath, Problem, describe_error, path_text
from dflash2.config.schema import Config
from dflash2.errors import ConfigError

MAX_FILE_BYTES = 64 << 10
"""A configuration is a few hundred bytes; more is another file by mistake."""

_BOMS = (codecs.BOM_UTF8, codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)


def load_config(path: str | os.PathLike[str]) -> Config:
    """Read and validate a configuration file.

    Raises:
        ConfigError: the file cannot be read or is not valid; names the file and lists every problem.
    """
    file = Path(path)
    try:
        with file.open("rb") as stream:
            data = stream.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"cannot read {file}: {error.strerror or error}") from error
    if len(data) > MAX_FILE_BYTES:
        raise ConfigError(f"{file} is larger than {MAX_FILE_BYTES >> 10} KiB; is it the right file?")
    return parse_config(_decode(data, str(file)), source=str(file), base_dir=Path(os.path.abspath(file)).parent)  # noqa: PTH100


def parse_config(text: str, source: str = "the configuration", base_dir: Path | None = None) -> Config:
    """Validate the text of a configuration file.

    Args:
        text: JSON.
        source: how error messages call it, such as the file's name.
        base_dir: what a relative path was probably relative to (it is refused all the same); by default the
            current directory.

    Raises:
        ConfigError: lists every problem; its ``path`` is set when there is exactly one.
    """
    try:
        document = json.loads(
            text, object_pairs_hook=_Object.from_pairs, parse_constant=_refuse_constant, parse_int=_bounded_int
        )
        repeated = list(_repeated_keys(document, ()))
    except RecursionError as error:
        raise ConfigError(f"{source} is nested too deeply to be a DFlash2 configuration") from error
    except json.JSONDecodeError as error:
        raise ConfigError(_syntax_message(text, source, error)) from error
    except ValueError as error:  # from the two hooks that refuse a number
        raise ConfigError(f"{source} is not valid JSON: {error}") from error
    if not isinstance(document, dict):
        raise ConfigError(f'{source} must hold one JSON object, such as {{"enable": true}}')
    problems = [Problem(path, "this key is written more than once") for path in repeated]
    config: Config | None = None
    try:
        config = Config.model_validate(document, context={"base_dir": base_dir or Path.cwd()})
    except ValidationError as error:
        problems += [describe_error(detail) for detail in error.errors(include_url=False)]
    if config is None or problems:
        _raise_problems(problems, source)
    return config


class _Object(dict[str, Any]):
    """A JSON object that remembers which keys were written more than once."""

    repeated: tuple[str, ...] = ()

    @classmethod
    def from_pairs(cls, pairs: list[tuple[str, Any]]) -> _Object:
        result = cls(pairs)
        if len(result) < len(pairs):
            counts = Counter(name for name, _ in pairs)
            result.repeated = tuple(name for name, count in counts.items() if count > 1)
        return result


def _repeated_keys(value: object, path: JSONPath) -> Iterator[JSONPath]:
    if isinstance(value, _Object):
        for name in value.repeated:
            yield (*path, name)
        for name, inner in value.items():
            yield from _repeated_keys(inner, (*path, name))
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            yield from _repeated_keys(inner, (*path, index))


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")


def _bounded_int(digits: str) -> int:
    if len(digits) > 30:
        raise ValueError(f"a number of {len(digits)} digits")
    return int(digits)


def _decode(data: bytes, source: str) -> str:
    if data.startswith(_BOMS):
        raise ConfigError(f"{source} starts with a byte-order mark; save it as UTF-8 without one")
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{source} is not UTF-8 text (byte {error.start}); is it the right file?") from error


def _syntax_message(text: str, source: str, error: json.JSONDecodeError) -> str:
    if not text.strip():
        return f'{source} is empty; the least it can hold is {{"enable": true}}'
    if text.startswith("\ufeff"):
        return f"{source} starts with a byte-order mark; save it as UTF-8 without one"
    return f"{source} is not valid JSON: line {error.lineno}, column {error.colno}: {error.msg}"


def _raise_problems(problems: list[Problem], source: str) -> NoReturn:
    if len(problems) == 1:
        raise ConfigError(f"{problems[0].message} (in {source})", path_text(problems[0].path))
    lines = [f"  {path_text(problem.path)}: {problem.message}" for problem in problems]
    raise ConfigError("\n".join([f"{len(problems)} problems in {source}:", *lines]))
