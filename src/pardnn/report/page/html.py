"""A report as one HTML file: tables for everybody, canvases where scripts run, no network.

Every text of a graph or plan goes through `escape` here, or as JSON into `textContent` there; a
policy in the page allows this page's own style and script, by their hashes, and nothing else. The
same report gives the same bytes.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from pardnn.errors import printable
from pardnn.report.page.contents import KINDS, PHASES, Report
from pardnn.report.page.tables import (
    bounds_table,
    devices_table,
    figures,
    largest_messages,
    longest_ops,
    matrix_table,
    measured_tables,
    modules_table,
    peaks_table,
    tried_table,
)
from pardnn.report.text import escaped

#: In the order in which they need each other; one script, as a browser loads no file beside it.
SCRIPTS = (
    "dom.js", "format.js", "palette.js", "timeline_view.js", "timeline_draw.js", "timeline.js",
    "memory.js", "modules.js", "find.js", "main.js",
)  # fmt: skip
SECTIONS = (
    "summary", "devices", "timeline", "memory", "modules", "messages", "bounds", "measured",
    "notes",
)  # fmt: skip
#: What could end the element that holds the data, or a line of it.
_ESCAPES = {"<": "\\u003c", ">": "\\u003e", "&": "\\u0026"}


def page_html(report: Report) -> str:
    """Return the page."""
    style, script = _package_text(("page.css",)), _package_text(SCRIPTS)
    policy = (
        f"default-src 'none'; script-src '{_digest(script)}'; style-src '{_digest(style)}'; "
        "img-src data:; base-uri 'none'; form-action 'none'"
    )
    names = [name for name in SECTIONS if name != "measured" or report.measured is not None]
    nav = " ".join(f'<a href="#{name}">{name}</a>' for name in names)
    body = "\n".join(_sections(report))
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escaped(report.title)}</title>\n<style>{style}</style>\n</head>\n<body>\n"
        f'<header><h1>{escaped(report.title)}</h1>\n<nav aria-label="Sections">{nav}</nav>\n'
        '<div id="find" role="search"></div></header>\n'
        f"<main>\n{body}\n</main>\n"
        f'<script type="application/json" id="report">{data_text(report)}</script>\n'
        f'<script type="module">{script}</script>\n</body>\n</html>\n'
    )


def data_text(report: Report) -> str:
    """Return a report as JSON that no browser takes for markup, whatever its names are."""
    data = _printable({"phases": PHASES, "kinds": KINDS, **_adapter().dump_python(report)})
    text = json.dumps(data, allow_nan=False, separators=(",", ":"))
    for character, code in _ESCAPES.items():
        text = text.replace(character, code)
    return text


def _printable(value: Any) -> Any:
    """Return JSON data in which no text acts on the page, as scripts insert it unchanged."""
    if isinstance(value, str):
        return printable(value)
    if isinstance(value, dict):
        return {_printable(key): _printable(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        if value and isinstance(value[0], int | float):  # a column of numbers, None among them
            return value
        return [_printable(item) for item in value]
    return value


@functools.cache
def _adapter() -> TypeAdapter[Report]:
    return TypeAdapter(Report)


@functools.cache
def _package_text(names: Sequence[str]) -> str:
    folder = Path(__file__).parent / "assets"
    return "\n" + "\n".join((folder / name).read_text(encoding="utf-8") for name in names)


def _digest(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _section(name: str, *parts: str) -> str:
    body = "\n".join(part for part in parts if part)
    title = name.capitalize()
    return (
        f'<section id="{name}" aria-labelledby="{name}-title">\n'
        f'<h2 id="{name}-title">{title}</h2>\n{body}\n</section>'
    )


def _drawn(name: str, table: str) -> str:
    """Return where a script draws, and what is shown there without scripts."""
    return f'<div id="{name}-view"></div>\n<noscript>{table}</noscript>'


def _sections(report: Report) -> Iterator[str]:
    yield _section("summary", *_summary(report))
    yield _section("devices", devices_table(report))
    yield _section("timeline", _drawn("timeline", longest_ops(report)))
    yield _section("memory", peaks_table(report), '<div id="memory-view"></div>')
    yield _section("modules", _drawn("modules", modules_table(report)))
    yield _section("messages", matrix_table(report), largest_messages(report))
    yield _section("bounds", bounds_table(report), tried_table(report))
    if report.measured is not None:
        yield _section("measured", *measured_tables(report))
    yield _section("notes", _listed(report.notes) if report.notes else "<p>None.</p>")


def _summary(report: Report) -> Iterator[str]:
    yield figures(report)
    for title, lines in (("What was decided", report.decided), ("What it costs", report.costs)):
        yield f"<h3>{title}</h3>\n{_listed(lines)}"
    yield f"<h3>What binds</h3>\n{_listed(each.text for each in report.binds)}"
    yield "<noscript><p>Without scripts the charts are tables.</p></noscript>"


def _listed(lines: Iterable[str]) -> str:
    return f"<ul>{''.join(f'<li>{escaped(line)}</li>' for line in lines)}</ul>"
