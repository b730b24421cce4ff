"""The wording of what is wrong in a configuration: where it is, what was found, what to write instead."""

from __future__ import annotations

import difflib
import json
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

from annotated_types import Ge, Gt, Le
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from dflash2.config.schema import Config
from dflash2.types import MIB

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails

JSONPath: TypeAlias = tuple[str | int, ...]

_EXPECTED = {
    "bool_type": "true or false",
    "int_type": "a whole number",
    "float_type": "a number",
    "string_type": "a string",
    "model_type": "an object",
    "list_type": "an array",
}
_RANGE_ERRORS = {"greater_than_equal", "greater_than", "less_than_equal", "less_than", "finite_number"}
_QUANTITY = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]?)(i?)(b?)(?:ytes?)?\s*", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing that is wrong.

    Attributes:
        path: keys from the top of the file; array positions are integers.
        message: what was found and what to write.
    """

    path: JSONPath
    message: str


def path_text(path: JSONPath) -> str:
    """``("memory", "nvme_path")`` as ``memory.nvme_path``; odd keys are quoted as in JSON."""
    text = ""
    for part in path:
        if isinstance(part, int):
            text += f"[{part}]"
        elif re.fullmatch(r"[A-Za-z_][A-Za-z0-9_-]*", part):
            text += f".{part}" if text else part
        else:
            text += f"[{json.dumps(part)}]"
    return text


def describe_error(error: ErrorDetails) -> Problem:
    """Word one of pydantic's errors for somebody who edits the file."""
    path: JSONPath = error["loc"]
    kind = error["type"]
    value = error["input"]
    if kind == "extra_forbidden":
        return Problem(path, _unknown_key(path))
    if kind in _EXPECTED:
        return Problem(path, _wrong_type(path, value, _EXPECTED[kind]))
    if kind in _RANGE_ERRORS:
        unit = " MiB" if str(path[-1]).endswith("_mb") else ""
        return Problem(path, f"{_shown(value)} is out of range ({_range_text(_field(path))}{unit})")
    if kind in ("too_short", "too_long"):
        limits = error["ctx"]
        wanted = f"at least {limits['min_length']}" if kind == "too_short" else f"at most {limits['max_length']}"
        return Problem(path, f"{limits['actual_length']} entries are not {wanted}")
    if kind == "literal_error":
        expected = error["ctx"]["expected"].replace("'", '"')
        near = difflib.get_close_matches(str(value), re.findall(r'"(\w+)"', expected), n=1)
        hint = f"; did you mean {_shown(near[0])}?" if near else ""
        return Problem(path, f"{_shown(value)} is not {expected}{hint}")
    if kind == "value_error":
        return Problem(path, str(error["ctx"]["error"]))
    return Problem(path, error["msg"])


def _shown(value: object) -> str:
    """The value as JSON, shortened."""
    text = json.dumps(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _unknown_key(path: JSONPath) -> str:
    """Name the nearest valid key: in the same section, then anywhere."""
    *section, name = [str(part) for part in path]
    known = _known_paths()
    here = {known_path[-1]: known_path for known_path in known if list(known_path[:-1]) == section}
    elsewhere = {known_path[-1]: known_path for known_path in known if list(known_path[:-1]) != section}
    wanted = re.sub(r"[^a-z0-9]+", "_", re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).lower()).strip("_")
    if wanted in elsewhere and wanted not in here:
        path_there = path_text(elsewhere[wanted])
        return f"unknown key here; it belongs {'at' if '.' in path_there else 'at the top, as'} {path_there}"
    for candidates in (here, elsewhere):
        near = difflib.get_close_matches(wanted, candidates, n=1, cutoff=0.6)
        if near:
            return f"unknown key; did you mean {path_text(candidates[near[0]])}?"
    return f"unknown key; the keys here are {', '.join(here)}"


def _wrong_type(path: JSONPath, value: object, expected: str) -> str:
    found = "null" if value is None else f"{_shown(value)}, {_kind(value)},"
    message = f"{found} is not {expected}"
    hint = _rewritten(str(path[-1]), value, expected)
    return f"{message}; {hint}" if hint else message


def _kind(value: object) -> str:
    kinds = {bool: "a boolean", int: "a number", float: "a number", str: "a string", list: "an array"}
    return kinds.get(type(value), "an object")


def _rewritten(name: str, value: object, expected: str) -> str:
    """What to write instead, where that can be told; else an empty string."""
    if isinstance(value, float) and expected == "a whole number":
        return f"write {round(value)}" if abs(value) < 1e15 else ""
    if not isinstance(value, str):
        return ""
    if expected == "true or false":
        return f"write {value.lower()} without quotes" if value.lower() in ("true", "false") else ""
    match = _QUANTITY.fullmatch(value)
    if match is None or expected not in ("a number", "a whole number"):
        return ""
    number, prefix, binary, letter = match.groups()
    if not prefix and not letter:
        return f"write {number} without quotes" + (", which is MiB" if name.endswith("_mb") else "")
    return _in_mebibytes(float(number), prefix, bool(binary)) if name.endswith("_mb") else "write it without a unit"


def _in_mebibytes(number: float, prefix: str, binary: bool) -> str:
    power = " kmgt".index(prefix.lower() or " ")
    mebibytes = round(number * 1024**power / MIB)
    if binary or power == 0:
        return f"write MiB as a number: {mebibytes}"
    decimal = round(number * 1000**power / MIB)
    unit = prefix.upper()
    return f"write MiB as a number: {decimal} for {number:g} {unit}B, {mebibytes} if {number:g} {unit}iB are meant"


def _field(path: JSONPath) -> FieldInfo:
    model: Any = Config
    for part in path[:-1]:
        model = model.model_fields[part].annotation
    field: FieldInfo = model.model_fields[path[-1]]
    return field


def _range_text(field: FieldInfo) -> str:
    low, high = "", ""
    for bound in _bounds(field):
        if isinstance(bound, Ge):
            low = f"{bound.ge}"
        elif isinstance(bound, Gt):
            low = f"above {bound.gt}"
        elif isinstance(bound, Le):
            high = f"{bound.le}"
    return f"{low} to {high}"


def _bounds(field: FieldInfo) -> list[Any]:
    """The field's own constraints; those of an optional field hang on the first member of its union."""
    if field.metadata:
        return field.metadata
    for member in getattr(field.annotation, "__args__", ()):
        for extra in getattr(member, "__metadata__", ()):
            if isinstance(extra, FieldInfo):
                return extra.metadata
    return []


def _known_paths() -> list[tuple[str, ...]]:
    paths: list[tuple[str, ...]] = []
    for name, field in Config.model_fields.items():
        paths.append((name,))
        section = field.annotation
        if isinstance(section, type) and issubclass(section, BaseModel):
            paths += [(name, key) for key in section.model_fields]
    return paths
