"""Lines over the number of devices, both axes in powers of two, as one hand-written SVG.

The same values give the same bytes. Colours are Okabe and Ito's, and each line also has its name
at its end, so that nothing hangs on colour alone.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from typing import NamedTuple

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 760, 420, 64, 130, 56, 44
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")


class Line(NamedTuple):
    """One line: values by number of devices; dashed ones are for comparison."""

    name: str
    values: Mapping[int, float]
    colour: int
    dashed: bool = False


class _Axes(NamedTuple):
    devices: Sequence[int]
    low: int
    high: int

    def x(self, devices: int) -> float:
        first, last = math.log2(self.devices[0]), math.log2(self.devices[-1])
        return LEFT + (WIDTH - LEFT - RIGHT) * (math.log2(devices) - first) / max(last - first, 1)

    def y(self, value: float) -> float:
        share = (math.log2(value) - self.low) / max(self.high - self.low, 1)
        return HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * share


def chart_svg(title: str, note: str, unit: str, lines: Sequence[Line]) -> str:
    """Return the picture.

    Args:
        title: One line over the picture.
        note: A smaller line under it.
        unit: Of the values.
        lines: With positive values; at least one value in all.
    """
    values = [value for line in lines for value in line.values.values()]
    devices = sorted({k for line in lines for k in line.values})
    low, high = math.floor(math.log2(min(values))), math.ceil(math.log2(max(values)))
    body = "\n".join(_body(title, note, unit, lines, _Axes(devices, low, high)))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
        f'font-family="sans-serif" font-size="12" role="img">\n<title>{escape(title)}</title>\n'
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#ffffff"/>\n{body}\n</svg>\n'
    )


def _body(title: str, note: str, unit: str, lines: Sequence[Line], axes: _Axes) -> Iterator[str]:
    yield f'<text x="{LEFT}" y="20" font-size="14" fill="#222222">{escape(title)}</text>'
    yield f'<text x="{LEFT}" y="38" fill="#555555">{escape(note)}</text>'
    step = max(1, (axes.high - axes.low) // 8)
    for power in range(axes.low, axes.high + 1, step):
        y = axes.y(2.0**power)
        ends = f'x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"'
        yield f'<line {ends} stroke="#e5e5e5"/>'
        place = f'x="{LEFT - 8}" y="{y + 4:.1f}"'
        yield f'<text {place} text-anchor="end" fill="#222222">{2.0**power:g}</text>'
    for k in axes.devices:
        place = f'x="{axes.x(k):.1f}" y="{HEIGHT - BOTTOM + 18}"'
        yield f'<text {place} text-anchor="middle" fill="#222222">{k}</text>'
    axis = f"devices; vertical: {escape(unit)}"
    yield f'<text x="{LEFT}" y="{HEIGHT - 8}" fill="#555555">{axis}</text>'
    for line in lines:
        yield from _line(line, axes)
    yield from _names(lines, axes)


def _line(line: Line, axes: _Axes) -> Iterator[str]:
    colour = COLOURS[line.colour % len(COLOURS)]
    points = [(axes.x(k), axes.y(value)) for k, value in sorted(line.values.items())]
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    dash = ' stroke-dasharray="5 4" opacity="0.6"' if line.dashed else ""
    yield f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"{dash}/>'
    if not line.dashed:
        for x, y in points:
            yield f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"/>'


def _names(lines: Sequence[Line], axes: _Axes) -> Iterator[str]:
    """Write the name of each line at its end, pushed down where two would meet."""
    ends = sorted(
        (axes.y(line.values[max(line.values)]), line) for line in lines if not line.dashed
    )
    below = 0.0
    for y, line in ends:
        below = max(y, below + 14)
        colour = COLOURS[line.colour % len(COLOURS)]
        yield (
            f'<text x="{WIDTH - RIGHT + 10}" y="{below + 4:.1f}" fill="{colour}">'
            f"{escape(line.name)}</text>"
        )
