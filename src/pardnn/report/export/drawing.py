"""Layers and devices as a graph to draw, for Graphviz (dot) and Mermaid.

A box is what one device runs of one module, including deeper modules if there are too many; an
arrow is what one box makes and another reads, bold if it is sent. Forward and backward ops share a
box, so arrows lead both ways.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from pardnn.errors import printable
from pardnn.report.page.modules import numbered_modules
from pardnn.report.page.simulated import Simulated
from pardnn.report.text import seconds_text
from pardnn.units import bytes_text

#: Boxes of one drawing; Mermaid refuses more than 500 arrows and no one reads so many.
MOST_BOXES = 120
#: What Mermaid shows as it is; all else is an entity, so that no name is markup.
_PLAIN = re.compile(r"[^A-Za-z0-9 .,:()/_-]")


class Box(NamedTuple):
    """What a device runs of a module: ops that compute, and their simulated seconds."""

    device: int
    module: str
    ops: int
    seconds: float


class Arrow(NamedTuple):
    """Bytes that one box makes and another reads; `is_sent` between devices."""

    source: int
    target: int
    bytes: int
    is_sent: bool


class Drawing(NamedTuple):
    """Boxes, and arrows between them by number."""

    title: str
    devices: tuple[str, ...]
    boxes: tuple[Box, ...]
    arrows: tuple[Arrow, ...]


def drawing_of(found: Simulated) -> Drawing:
    """Return the boxes and arrows of a plan."""
    modules, number = numbered_modules(found)
    k = found.arrays.num_devices
    box, keys = _boxed(modules, number, found.arrays.place, k)
    is_call = np.array([not op.is_source for op in found.graph.ops])
    ops = np.bincount(box, weights=is_call, minlength=len(keys)).astype(np.int64)
    seconds = np.bincount(box, weights=found.seconds, minlength=len(keys))
    return Drawing(
        title=f"{found.graph.name} by {found.plan.algorithm}",
        devices=tuple(found.names),
        boxes=tuple(
            Box(device, module, count, took)
            for (device, module), count, took in zip(
                keys, ops.tolist(), seconds.tolist(), strict=True
            )
        ),
        arrows=tuple(_arrows(found, box)),
    )


def _boxed(
    modules: list[str], number: np.ndarray, place: np.ndarray, k: int
) -> tuple[np.ndarray, list[tuple[int, str]]]:
    """Return the box of each op, and the boxes, by the deepest modules that are few enough."""
    depth = max((path.count(".") for path in modules), default=0) + 1
    while True:
        rows: dict[str, int] = {}
        cut = [".".join(path.split(".")[:depth]) for path in modules]
        short = np.array([rows.setdefault(path, len(rows)) for path in cut], dtype=np.int64)
        used, box = np.unique(short[number] * k + place, return_inverse=True)
        if len(used) <= MOST_BOXES or depth == 1:
            names = list(rows)
            return box, [(each % k, names[each // k]) for each in used.tolist()]
        depth -= 1


def _arrows(found: Simulated, box: np.ndarray) -> Iterator[Arrow]:
    """Yield what boxes pass to each other; a tensor counts once per box that reads it."""
    a, place = found.graph.arrays, found.arrays.place
    reader = np.repeat(np.arange(a.num_ops), np.diff(a.input_ptr))
    source, target = box[a.tensor_op[a.input_tensor]], box[reader]
    is_between = source != target
    rows = np.stack([source, target, a.input_tensor])[:, is_between]
    source, target, tensor = np.unique(rows, axis=1)
    count = int(box.max(initial=0)) + 1
    pair, inverse = np.unique(source * count + target, return_inverse=True)
    size = np.bincount(inverse, weights=a.tensor_bytes[tensor], minlength=len(pair))
    device = np.zeros(count, dtype=np.int64)
    device[box] = place
    for both, total in zip(pair.tolist(), size.tolist(), strict=True):
        one, other = divmod(both, count)
        yield Arrow(one, other, int(total), bool(device[one] != device[other]))


def dot_text(drawing: Drawing) -> str:
    """Return the drawing in Graphviz's language."""
    return "\n".join(_dot(drawing)) + "\n"


def _dot(drawing: Drawing) -> Iterator[str]:
    yield "digraph plan {"
    yield f"  label={_quoted(drawing.title)};"
    yield '  node [shape="box"];'
    for device, name in enumerate(drawing.devices):
        yield f"  subgraph cluster_{device} {{"
        yield f"    label={_quoted(name)};"
        for number, box in enumerate(drawing.boxes):
            if box.device == device:
                yield f"    n{number} [label={_quoted(*_label(box))}];"
        yield "  }"
    for arrow in drawing.arrows:
        style = ', style="bold"' if arrow.is_sent else ""
        label = _quoted(bytes_text(arrow.bytes))
        yield f"  n{arrow.source} -> n{arrow.target} [label={label}{style}];"
    yield "}"


def _quoted(*lines: str) -> str:
    """Return lines as a dot string, in which backslashes are escaped."""
    shown = (printable(line).replace("\\", "\\\\").replace('"', '\\"') for line in lines)
    return '"' + "\\n".join(shown) + '"'


def mermaid_text(drawing: Drawing) -> str:
    """Return the drawing in Mermaid's language, as Markdown pages show it."""
    return "\n".join(_mermaid(drawing)) + "\n"


def _mermaid(drawing: Drawing) -> Iterator[str]:
    yield "flowchart LR"
    for device, name in enumerate(drawing.devices):
        yield f"  subgraph d{device}[{_entities(name)}]"
        for number, box in enumerate(drawing.boxes):
            if box.device == device:
                yield f"    n{number}[{_entities(*_label(box))}]"
        yield "  end"
    for arrow in drawing.arrows:
        line = "==>" if arrow.is_sent else "-->"
        size = _entities(bytes_text(arrow.bytes))
        yield f"  n{arrow.source} {line}|{size}| n{arrow.target}"


def _entities(*lines: str) -> str:
    """Return lines as a string of Mermaid."""
    shown = (_PLAIN.sub(lambda c: f"#{ord(c[0])};", printable(line)) for line in lines)
    return '"' + "<br/>".join(shown) + '"'


def _label(box: Box) -> tuple[str, str]:
    ops = "1 op" if box.ops == 1 else f"{box.ops} ops"
    return box.module or "(no module)", f"{ops}, {seconds_text(box.seconds)}"
