"""The picture of the scale page: seconds against ops, both axes logarithmic."""

from __future__ import annotations

import math
from typing import Any

WIDTH, HEIGHT, MARGIN = 640, 420, 56
#: Name, key of a row, colour.
LINES = (
    ("planning", "seconds", "#1f6fb2"),
    ("planning under a limit", "tight", "#c2451e"),
    ("one bottom-level pass", "pass", "#5b8c3a"),
)


def picture(rows: list[dict[str, Any]]) -> str:
    """Return an SVG of the layered graphs' seconds against their ops.

    Args:
        rows: From `measure`; those that lack a line's key are left out of it.
    """
    shown = [row for row in rows if row["graph"] == "layered"]
    sizes = [row["ops"] for row in shown]
    times = [row[key] for row in shown for _, key, _ in LINES if key in row]
    across, upward = _decades(sizes), _decades(times)
    box = f'viewBox="0 0 {WIDTH} {HEIGHT}"'
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {box} font-family="sans-serif" font-size="12">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        f'<text x="{WIDTH / 2}" y="18" text-anchor="middle">processor seconds against ops</text>',
    ]
    for at in range(across[0], across[1] + 1):
        x = _at(10.0**at, across, MARGIN, WIDTH - MARGIN)
        parts.append(_rule(x, MARGIN / 2, x, HEIGHT - MARGIN))
        parts.append(f'<text x="{x:.1f}" y="{HEIGHT - MARGIN + 18}">{10**at:,}</text>')
    for at in range(upward[0], upward[1] + 1):
        y = _at(10.0**at, upward, HEIGHT - MARGIN, MARGIN / 2)
        parts.append(_rule(MARGIN, y, WIDTH - MARGIN, y))
        parts.append(f'<text x="4" y="{y + 4:.1f}">{10.0**at:g} s</text>')
    for number, (name, key, colour) in enumerate(LINES):
        points = [
            (
                _at(row["ops"], across, MARGIN, WIDTH - MARGIN),
                _at(row[key], upward, HEIGHT - MARGIN, MARGIN / 2),
            )
            for row in shown
            if key in row
        ]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"/>' for x, y in points]
        x = MARGIN + 190 * number
        parts.append(f'<text x="{x}" y="{HEIGHT - 12}" fill="{colour}">{name}</text>')
    return "\n".join([*parts, "</svg>\n"])


def _decades(values: list[float]) -> tuple[int, int]:
    low, high = math.floor(math.log10(min(values))), math.ceil(math.log10(max(values)))
    return low, max(high, low + 1)


def _at(value: float, decades: tuple[int, int], begin: float, end: float) -> float:
    share = (math.log10(value) - decades[0]) / (decades[1] - decades[0])
    return begin + share * (end - begin)


def _rule(x: float, y: float, to_x: float, to_y: float) -> str:
    line = f'<line x1="{x:.1f}" y1="{y:.1f}" x2="{to_x:.1f}" y2="{to_y:.1f}"'
    return line + ' stroke="#ddd"/>'
