"""The picture of a layout: each layer's weight beside its output, as tiles (Tofu, Fig. 11).

Each tensor is drawn over the two dims that are cut first; a tile has the colours of the devices
that hold it, several colours if several do, and grey if all do. Layers with equal layouts share a
row.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from pardnn.graph.ir import Tensor
from pardnn.plan.mesh import Box, Mesh, boxes_of
from pardnn.report.layout import LayoutResult, LayoutRow, reading, short_placements
from pardnn.report.text import escaped

#: Colours of devices (Okabe and Ito), then hues around the circle.
COLOURS = (
    "#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#F0E442", "#666666",
)  # fmt: skip
WIDTH, ROW, TILE = 960, 82, 60
#: Where a layer's name, its weight and its output begin.
NAME, WEIGHT, OUTPUT = 20, 330, 650
#: Characters of a line below the title; layers that a row names.
LINE, LAYERS = 140, 4


def layout_svg(title: str, result: LayoutResult) -> str:
    """Return the layouts as a picture."""
    mesh = Mesh(shape=result.mesh, names=result.axes, shares=result.shares)
    pairs, who = _pairs(result.rows), "device" if result.submeshes == 1 else "position"
    lines = [part for line in reading(result) for part in textwrap.wrap(line, LINE)]
    height = 90 + 18 * len(lines) + ROW * len(pairs)
    body = "\n".join(_body(title, mesh, pairs, lines, who))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" '
        f'font-family="sans-serif" font-size="12" role="img">\n<title>{escaped(title)}</title>\n'
        f'<rect width="{WIDTH}" height="{height}" fill="#ffffff"/>\n{body}\n</svg>\n'
    )


def colour(device: int) -> str:
    """Return the colour of a device."""
    if device < len(COLOURS):
        return COLOURS[device]
    return f"hsl({device * 137 % 360},60%,{35 + device * 7 % 35}%)"


@dataclass(frozen=True)
class _Pair:
    """A row of the picture: layers with equal layouts, their weight and output."""

    layers: tuple[tuple[str, int], ...]
    weight: LayoutRow | None
    output: LayoutRow | None


def _pairs(rows: Sequence[LayoutRow]) -> list[_Pair]:
    """Return the rows of the picture, in the order of the step; biases are left out."""
    weights: dict[str, LayoutRow] = {}
    outputs: dict[str, LayoutRow] = {}
    for row in rows:
        layer = row.tensor.rpartition(".")[0] or row.tensor
        kept = weights if row.role == "weight" else outputs
        if layer not in kept or len(row.shape) > len(kept[layer].shape):
            kept[layer] = row
    found: dict[tuple[object, ...], list[tuple[str, int]]] = {}
    pairs: dict[tuple[object, ...], tuple[LayoutRow | None, LayoutRow | None]] = {}
    for layer in dict.fromkeys([*weights, *outputs]):
        weight, output = weights.get(layer), outputs.get(layer)
        key = tuple(row and (row.shape, row.placements) for row in (weight, output))
        some = output or weight
        assert some is not None
        found.setdefault(key, []).append((layer, some.count))
        pairs.setdefault(key, (weight, output))
    return [_Pair(tuple(layers), *pairs[key]) for key, layers in found.items()]


def _body(
    title: str, mesh: Mesh, pairs: Sequence[_Pair], lines: Sequence[str], who: str
) -> Iterator[str]:
    """Yield the elements of the picture.

    Args:
        title: Of the picture.
        mesh: The devices, or the positions of each submesh.
        pairs: Its rows.
        lines: What the layout means.
        who: Holds the tiles, "device" or "position".
    """
    yield f'<text x="20" y="22" font-size="14" fill="#222222">{escaped(title)}</text>'
    for device in range(min(mesh.size, 16)):
        x = 20 + 52 * device
        yield f'<rect x="{x}" y="34" width="12" height="12" fill="{colour(device)}"/>'
        yield f'<text x="{x + 15}" y="44" fill="#222222">{device}</text>'
    for number, line in enumerate(lines):
        yield f'<text x="{NAME}" y="{66 + 18 * number}" fill="#222222">{escaped(line)}</text>'
    top = 76 + 18 * len(lines)
    for x, head in ((WEIGHT, "weight"), (OUTPUT, "output")):
        yield f'<text x="{x}" y="{top}" fill="#555555">{head}</text>'
    for number, pair in enumerate(pairs):
        yield from _row(pair, mesh, top + 10 + ROW * number, who)


def _row(pair: _Pair, mesh: Mesh, top: int, who: str) -> Iterator[str]:
    for number, (layer, count) in enumerate(pair.layers[:LAYERS]):
        is_last = number == LAYERS - 1 and len(pair.layers) > LAYERS
        more = f" and {len(pair.layers) - LAYERS} more" if is_last else ""
        times = f" (x {count})" if count > 1 else ""
        text = escaped(f"{layer}{times}{more}")
        yield f'<text x="{NAME}" y="{top + 14 + 16 * number}" fill="#222222">{text}</text>'
    for row, left in ((pair.weight, WEIGHT), (pair.output, OUTPUT)):
        if row is not None:
            yield from _tensor(row, mesh, left, top, who)


def _tensor(row: LayoutRow, mesh: Mesh, left: int, top: int, who: str) -> Iterator[str]:
    dims = _shown_dims(row)
    sizes = {dim: row.shape[dim] for dim in dims}
    across = 2 * TILE
    for place, devices in _tiles(row, mesh, dims).items():
        (a, b), (c, d) = _scaled(place, dims, sizes)
        stripes = [(f"{who} {device}", colour(device)) for device in devices]
        if len(devices) == mesh.size > 1:
            stripes = [(f"all {who}s", "#d9d9d9")]
        yield from _tile(
            left + across * c, top + TILE * a, across * (d - c), TILE * (b - a), stripes
        )
    words = [" x ".join(map(str, row.shape)) or "number", short_placements(row.placements)]
    if dims and len(row.shape) > 2:
        words.append(" x ".join(f"dim {dim}" for dim in dims))
    for number, word in enumerate(words):
        x, y = left + across + 8, top + 18 + 16 * number
        yield f'<text x="{x}" y="{y}" fill="#555555">{word}</text>'


def _shown_dims(row: LayoutRow) -> tuple[int, ...]:
    """Return the dims that are drawn: those cut first, then the first ones, in their order."""
    cut = [int(word[6:-1]) for word in row.placements if word.startswith("Shard(")]
    listed = list(dict.fromkeys([*cut, *range(len(row.shape))]))[:2]
    return tuple(sorted(listed))


def _tiles(
    row: LayoutRow, mesh: Mesh, dims: Sequence[int]
) -> Mapping[tuple[tuple[int, int], ...], list[int]]:
    boxes = boxes_of(Tensor(name="", bytes=0, shape=row.shape), row.placements, mesh)
    assert boxes is not None
    found: dict[Box, list[int]] = {}
    for device, box in enumerate(boxes):
        found.setdefault(tuple(box[dim] for dim in dims), []).append(device)
    return found


def _scaled(
    place: tuple[tuple[int, int], ...], dims: Sequence[int], sizes: Mapping[int, int]
) -> tuple[tuple[float, float], tuple[float, float]]:
    """Return the ends of a tile down and across, from 0 to 1."""
    ends = [(a / max(sizes[dim], 1), b / max(sizes[dim], 1)) for dim, (a, b) in
            zip(dims, place, strict=True)]  # fmt: skip
    if len(ends) == 2:
        return ends[0], ends[1]
    return (0.0, 1.0), ends[0] if ends else (0.0, 1.0)


def _tile(
    x: float, y: float, width: float, height: float, stripes: Sequence[tuple[str, str]]
) -> Iterator[str]:
    """Draw a tile, one stripe for each of its devices: their titles and colours."""
    stripe = width / len(stripes)
    for number, (title, fill) in enumerate(stripes):
        yield (
            f'<rect x="{x + number * stripe:.1f}" y="{y:.1f}" width="{stripe:.1f}" '
            f'height="{height:.1f}" fill="{fill}"><title>{title}</title></rect>'
        )
    yield (
        f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" fill="none" '
        f'stroke="#ffffff" stroke-width="1.5"/>'
    )
