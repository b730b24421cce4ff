"""The tables of the documents that follow from the code: every configuration key, every metric, every decision.

`python tools/docs/tables.py` writes them between the marks in the documents; a test compares them.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

from annotated_types import Ge, Gt, Le
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from dflash2.config.schema import Config
from dflash2.monitoring.latency import BOUNDS_S
from dflash2.monitoring.pitfalls import RULES
from dflash2.monitoring.prometheus import METRICS, PLACEHOLDERS, PREFIX

DOCS = Path(__file__).resolve().parents[2] / "docs"
_UNITS = {"_mb": "MiB", "_s": "seconds", "_tokens": "tokens"}


def configuration() -> str:
    """One table for each section of the file."""
    parts = [_section("The switch", Config, "", lambda field: not _is_section(field))]
    for name, field in Config.model_fields.items():
        if _is_section(field):
            assert isinstance(field.annotation, type)
            parts.append(_section(f"`{name}`", field.annotation, f"{name}."))
    return "\n".join(parts)


def metrics() -> str:
    """All metrics in the order in which they are exported."""
    lines = ["| metric | kind | labels | meaning |", "|--|--|--|--|"]
    for series in METRICS:
        suffix = "_total" if series.kind == "counter" else ""
        labels = ", ".join(f"`{label}`" for label in series.labels) or "–"
        lines.append(f"| `{PREFIX}{series.name}{suffix}` | {series.kind} | {labels} | {series.help} |")
    lines.append(f"| `{PREFIX}http_requests_total` | counter | `route`, `status` | HTTP requests answered. |")
    lines += ["", "| label | values |", "|--|--|"]
    for label in dict.fromkeys(label for label, _ in PLACEHOLDERS.values()):
        values = [value for name, group in PLACEHOLDERS.values() if name == label for value in group]
        lines.append(f"| `{label}` | {', '.join(f'`{value}`' for value in dict.fromkeys(values))} |")
    bounds = ", ".join(f"{bound:g}" for bound in BOUNDS_S)
    return "\n".join([*lines, "", f"Buckets of the histograms, in seconds: {bounds}.", ""])


def advice() -> str:
    """What the server warns of, by id."""
    lines = ["| id | what it means |", "|--|--|"]
    rows = (re.sub(r" \(R-[\d.]+\)", "", rule.__doc__ or "") for rule in RULES.values())
    return "\n".join([*lines, *(f"| `{name}` | {text} |" for name, text in zip(RULES, rows, strict=True)), ""])


def decisions() -> str:
    """All decision records by their titles."""
    files = sorted((DOCS / "decisions").glob("[0-9]*.md"))
    titles = (file.read_text(encoding="utf-8").partition("\n")[0].lstrip("# ") for file in files)
    return "\n".join([*(f"- [{title}]({file.name})" for title, file in zip(titles, files, strict=True)), ""])


TABLES: dict[str, tuple[str, Callable[[], str]]] = {
    "configuration": ("configuration.md", configuration),
    "metrics": ("metrics.md", metrics),
    "decisions": ("decisions/index.md", decisions),
    "advice": ("troubleshooting.md", advice),
}
"""By the name of the mark: the document, and what stands there."""


def with_table(text: str, name: str, table: str) -> str:
    """A document with the table between its marks."""
    begin, end = f"<!-- begin {name}: written by tools/docs/tables.py -->", f"<!-- end {name} -->"
    before, _, rest = text.partition(begin)
    return f"{before}{begin}\n\n{table}\n{end}{rest.partition(end)[2]}"


def _section(title: str, model: type[BaseModel], prefix: str, wanted: Callable[[FieldInfo], bool] = bool) -> str:
    rows = [
        f"| `{prefix}{name}` | {_default(field)} | {_range(field)} | {_doc(model, name)} |"
        for name, field in model.model_fields.items()
        if wanted(field)
    ]
    about = "" if model is Config else f"{_one_line(model.__doc__ or '')}\n\n"
    return "\n".join([f"### {title}\n", f"{about}| key | default | values | meaning |", "|--|--|--|--|", *rows, ""])


def _is_section(field: FieldInfo) -> bool:
    return isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel)


def _default(field: FieldInfo) -> str:
    value: Any = field.default
    return "–" if value is None else f"`{str(value).lower() if isinstance(value, bool) else value}`"


def _range(field: FieldInfo) -> str:
    text = str(field.annotation)
    if "Literal" in text:
        return ", ".join(f"`{choice}`" for choice in re.findall(r"'(\w+)'", text))
    bounds = list(field.metadata)
    for member in getattr(field.annotation, "__args__", ()):
        bounds += [bound for extra in getattr(member, "__metadata__", ()) for bound in getattr(extra, "metadata", [])]
    low = next((f"{bound.ge}" for bound in bounds if isinstance(bound, Ge)), "")
    low = next((f"above {bound.gt}" for bound in bounds if isinstance(bound, Gt)), low)
    high = next((f"{bound.le}" for bound in bounds if isinstance(bound, Le)), "")
    if low and high:
        return f"{low} to {high}"
    if "list[str]" in text:
        return "array of texts"
    return "`true`, `false`" if field.annotation is bool else "text" if "str" in text else "–"


def _doc(model: type[BaseModel], name: str) -> str:
    """The string below the field in the source, with its unit if the name says one."""
    source = (Path(__file__).resolve().parents[2] / "src/dflash2/config/schema.py").read_text(encoding="utf-8")
    body = source[source.index(f"class {model.__name__}(") :]
    match = re.search(rf'^    {name}: .*?\n    """(.*?)"""', body, re.DOTALL | re.MULTILINE)
    if match is None:
        raise SystemExit(f"{model.__name__}.{name} has no description")
    unit = next((f" In {unit}." for suffix, unit in _UNITS.items() if name.endswith(suffix)), "")
    return _one_line(match[1]) + unit


def _one_line(text: str) -> str:
    return " ".join(textwrap.dedent(text).split()).replace("``", "`").replace("|", "\\|")


def main() -> None:
    """Write all tables."""
    for name, (file, table) in TABLES.items():
        path = DOCS / file
        path.write_text(with_table(path.read_text(encoding="utf-8"), name, table()), encoding="utf-8")
        print(f"wrote {name} in {path}")


if __name__ == "__main__":
    main()
