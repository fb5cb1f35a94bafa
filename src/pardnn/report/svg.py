"""A plan as one picture: what each device computes over simulated time, and what it holds.

Hand-written SVG: one file, no scripts, names escaped. The colours (Okabe and Ito) are
distinguishable for colour-blind readers; the same plan gives the same bytes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

from pardnn.report.text import escaped, seconds_text
from pardnn.units import bytes_text

WIDTH, LEFT, RIGHT = 960, 76, 34
TOP, BAR, CURVE, GAP = 78, 26, 44, 18
COLOURS = {"forward": "#0072B2", "backward": "#E69F00", "update": "#009E73"}


class Bar(NamedTuple):
    """An op on a device's track: seconds, and a key of `COLOURS`."""

    start: float
    finish: float
    phase: str
    name: str


class Track(NamedTuple):
    """One device: its ops, the bytes it holds at times in seconds, and its limit in bytes."""

    name: str
    bars: Sequence[Bar]
    times: Sequence[float]
    held: Sequence[int]
    limit: int | None


def plan_svg(title: str, subtitle: str, tracks: Sequence[Track], makespan: float) -> str:
    """Return the picture of a plan.

    Args:
        title: One line over the picture, up to some 110 characters wide.
        subtitle: A smaller line below it.
        tracks: One per device.
        makespan: Simulated seconds of the step.
    """
    height = TOP + len(tracks) * (BAR + CURVE + GAP) + 30
    body = "\n".join(
        [
            *_lines(title, subtitle),
            *_legend(),
            *(line for i, each in enumerate(tracks) for line in _track(each, i, makespan)),
            *_axis(makespan, height - 18),
        ]
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" '
        f'font-family="sans-serif" font-size="12" role="img">\n'
        f"<title>{escaped(title)}, {escaped(subtitle)}</title>\n"
        f'<rect width="{WIDTH}" height="{height}" fill="#ffffff"/>\n{body}\n</svg>\n'
    )


def _lines(title: str, subtitle: str) -> Iterator[str]:
    """Yield the two lines of text; one too long for the frame is squeezed into it."""
    for text, y, size in (title, 20, 14), (subtitle, 37, 11):
        fit = WIDTH - LEFT - RIGHT
        # Letters are some 0.55 of their height wide.
        squeezed = f' textLength="{fit}" lengthAdjust="spacingAndGlyphs"'
        wide = squeezed if 0.55 * size * len(text) > fit else ""
        place = f'x="{LEFT}" y="{y}" font-size="{size}"{wide}'
        yield f'<text {place} fill="#222222">{escaped(text)}</text>'


def _legend() -> Iterator[str]:
    x = LEFT
    for phase, colour in COLOURS.items():
        yield f'<rect x="{x}" y="{TOP - 28}" width="12" height="12" fill="{colour}"/>'
        yield f'<text x="{x + 16}" y="{TOP - 18}" fill="#222222">{phase}</text>'
        x += 90
    yield f'<text x="{x}" y="{TOP - 18}" fill="#222222">grey: bytes held, dashed: limit</text>'


def _axis(makespan: float, bottom: float) -> Iterator[str]:
    ends = f'x1="{LEFT}" x2="{WIDTH - RIGHT}"'
    yield f'<line {ends} y1="{bottom - 8}" y2="{bottom - 8}" stroke="#222222"/>'
    for at in _ticks(makespan):
        place = f'x="{_x(at, makespan):.0f}" y="{bottom + 6}"'
        yield f'<text {place} text-anchor="middle" fill="#222222">{seconds_text(at)}</text>'


def _ticks(makespan: float) -> list[float]:
    """Return four to nine round times from 0 to the end."""
    if makespan <= 0:
        return [0.0]
    power = 10.0 ** math.floor(math.log10(makespan / 4))
    step = max(each * power for each in (1, 2, 5) if each * power <= makespan / 4)
    # Rounded to the power of ten below: 3 x 0.1 would read 0.30000000000000004.
    digits = 1 - math.floor(math.log10(power))
    return [round(i * step, digits) for i in range(int(makespan / step) + 1)]


def _x(seconds: float, makespan: float) -> float:
    return LEFT + (WIDTH - LEFT - RIGHT) * (seconds / makespan if makespan > 0 else 0.0)


def _merged(bars: Sequence[Bar], makespan: float) -> Iterator[Bar]:
    """Join neighbours of one phase that touch: a quarter of a pixel shows no gap."""
    gap = makespan / (WIDTH - LEFT - RIGHT) / 4
    current: Bar | None = None
    first = ""
    for bar in sorted(bars):
        if bar.finish <= bar.start:
            continue
        if current and bar.phase == current.phase and bar.start - current.finish <= gap:
            current = current._replace(finish=bar.finish, name=f"{first} to {bar.name}")
            continue
        if current:
            yield current
        current, first = bar, bar.name
    if current:
        yield current


def _track(track: Track, number: int, makespan: float) -> Iterator[str]:
    top = TOP + number * (BAR + CURVE + GAP)
    name = escaped(track.name)
    yield f'<text x="{LEFT - 8}" y="{top + 17}" text-anchor="end" fill="#222222">{name}</text>'
    yield (
        f'<rect x="{LEFT}" y="{top}" width="{WIDTH - LEFT - RIGHT}" height="{BAR}" fill="#f2f2f2"/>'
    )
    for bar in _merged(track.bars, makespan):
        begin, end = _x(bar.start, makespan), _x(bar.finish, makespan)
        tip = f"<title>{escaped(bar.name)}, {seconds_text(bar.finish - bar.start)}</title>"
        yield (
            f'<rect x="{begin:.2f}" y="{top}" width="{max(end - begin, 0.1):.2f}" '
            f'height="{BAR}" fill="{COLOURS[bar.phase]}">{tip}</rect>'
        )
    if track.held:
        yield from _curve(track, top + BAR + 2, makespan)


def _per_pixel(track: Track, makespan: float) -> Iterator[tuple[float, int]]:
    """Yield the largest number of bytes held within each half of a pixel."""
    largest: dict[float, int] = {}
    for seconds, held in zip(track.times, track.held, strict=True):
        x = round(2 * _x(seconds, makespan)) / 2
        largest[x] = max(largest.get(x, 0), held)
    yield from largest.items()


def _curve(track: Track, top: int, makespan: float) -> Iterator[str]:
    scale = max(*track.held, track.limit or 0, 1)

    def y(held: float) -> float:
        return top + CURVE - CURVE * held / scale

    points = [f"{LEFT},{top + CURVE}"]
    steps = list(_per_pixel(track, makespan))
    for (begin, held), (end, _) in pairwise([*steps, (_x(makespan, makespan), 0)]):
        points += [f"{x:g},{y(held):.1f}" for x in (begin, end)]
    points.append(f"{_x(makespan, makespan):.1f},{top + CURVE}")
    yield f'<polygon points="{" ".join(points)}" fill="#bbbbbb"/>'
    if track.limit is not None:
        at = y(track.limit)
        yield (
            f'<line x1="{LEFT}" y1="{at:.1f}" x2="{WIDTH - RIGHT}" y2="{at:.1f}" '
            f'stroke="#D55E00" stroke-dasharray="4 3"/>'
            f'<text x="{WIDTH - RIGHT - 4}" y="{at + 11:.1f}" text-anchor="end" font-size="10" '
            f'fill="#A04000">{bytes_text(track.limit)}</text>'
        )
    yield (
        f'<text x="{LEFT - 8}" y="{top + 16}" text-anchor="end" font-size="10" fill="#555555">'
        f"{bytes_text(max(track.held))}</text>"
    )
