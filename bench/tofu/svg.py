"""Bars of throughput relative to ideal, in groups, as one hand-written SVG: Tofu's figures 8 and 9.

The same values give the same bytes. Each bar carries its samples/s, and an empty one the word OOM,
so that nothing hangs on colour alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from html import escape
from typing import Any

from bench.thesis.svg import COLOURS

BAR, GAP, LEFT, TOP, TALL, BOTTOM = 24, 18, 48, 72, 220, 36
#: Of the scale: 1.0 is ideal.
HIGHEST = 1.1


def bars_svg(title: str, note: str, rows: Sequence[Mapping[str, Any]], ways: Sequence[str]) -> str:
    """Return the picture.

    Args:
        title: One line over the picture.
        note: A smaller line under it.
        rows: What `tofu_models.measure` returned, each with "graph", "ideal" and the ways.
        ways: Bars of a group, from left to right.
    """
    group = len(ways) * BAR + GAP
    width, height = LEFT + len(rows) * group + 8, TOP + TALL + BOTTOM
    body = "\n".join(_body(title, note, rows, ways, width))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        f'font-family="sans-serif" font-size="12" role="img">\n<title>{escape(title)}</title>\n'
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>\n{body}\n</svg>\n'
    )


def _y(share: float) -> float:
    return TOP + TALL * (1 - min(share, HIGHEST) / HIGHEST)


def _body(
    title: str, note: str, rows: Sequence[Mapping[str, Any]], ways: Sequence[str], width: int
) -> Iterator[str]:
    yield f'<text x="{LEFT}" y="18" font-size="14" fill="#222222">{escape(title)}</text>'
    yield f'<text x="{LEFT}" y="35" fill="#555555">{escape(note)}</text>'
    for number, way in enumerate(ways):
        x = LEFT + 150 * number
        yield f'<rect x="{x}" y="44" width="10" height="10" fill="{COLOURS[number]}"/>'
        yield f'<text x="{x + 15}" y="53" fill="#222222">{escape(way)}</text>'
    for share in (0.0, 0.25, 0.5, 0.75, 1.0):
        y = _y(share)
        ends = f'x1="{LEFT}" x2="{width - 8}" y1="{y:.1f}" y2="{y:.1f}"'
        yield f'<line {ends} stroke="#e5e5e5"/>'
        place = f'x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end"'
        yield f'<text {place} fill="#222222">{share:.0%}</text>'
    for number, row in enumerate(rows):
        yield from _group(row, ways, LEFT + GAP / 2 + number * (len(ways) * BAR + GAP))


def _group(row: Mapping[str, Any], ways: Sequence[str], left: float) -> Iterator[str]:
    middle = left + len(ways) * BAR / 2
    place = f'x="{middle:.1f}" y="{TOP + TALL + 16}" text-anchor="middle"'
    yield f'<text {place} fill="#222222" font-size="11">{escape(row["graph"])}</text>'
    for number, way in enumerate(ways):
        found = row[way]
        x, rate = left + number * BAR, found.get("samples_per_s", 0.0)
        y = _y(rate / row["ideal"]["samples_per_s"])
        box = f'x="{x:.1f}" y="{y:.1f}" width="{BAR - 3}" height="{TOP + TALL - y:.1f}"'
        yield f'<rect {box} fill="{COLOURS[number]}"/>'
        text = "OOM" if "error" in found else f"{rate:.3g}"
        place = f'x="{x + (BAR - 3) / 2:.1f}" y="{y - 3:.1f}" text-anchor="middle"'
        yield f'<text {place} fill="#222222" font-size="9">{text}</text>'
